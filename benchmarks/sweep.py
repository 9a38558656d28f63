"""What running many seeds side by side costs: the packing of runs in slots, the supervisor, and leaks.

    python benchmarks/sweep.py [--quick] [--json FILE]

Four runs of the demo in two slots of one core each, against the best packing of the same four runs, each measured alone
on one core. The supervisor is the process of `async-grpo sweep`, with its table on a pseudo terminal, from the first
start to the last end. What two busy cores take from each other, whatever runs on them, is measured in each round, too:
with a plain loop of torch that shares nothing. Simulated runs are children that sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.control import PAIRS, control_s
from benchmarks.table import Row, as_text, row, write_json

from async_grpo_experiments.slots.ledger import FINISHED, RUNNING, Ledger, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"
SEEDS = (42, 1337, 2024, 9999)
SLOTS = 2
CHILDREN, PLACES = 1000, 16
PLAIN_LOOP = """
import sys, time, torch
torch.set_num_threads(1)
embed, head = torch.nn.Embedding(2000, 128), torch.nn.Linear(128, 512)
print("ready", flush=True)
sys.stdin.readline()
started = time.monotonic()
for _ in range(6000):
    head(embed(torch.randint(0, 2000, (64, 16)))).sum().backward()
print(time.monotonic() - started)
"""


class Measured(NamedTuple):
    """A sweep."""

    wall_s: float  # from the first start to the last end
    supervisor: float  # share of a core, meanwhile
    runs_s: list[float]


def sweep(folder: Path, seeds: tuple[int, ...], slots: int, steps: int) -> Measured:
    """Run a sweep of the demo, with its table on a terminal."""
    screen, terminal = pty.openpty()
    threading.Thread(target=drain, args=(screen,), daemon=True).start()
    arguments = ["sweep", str(RECIPE), "--seeds", ",".join(map(str, seeds)), "--num-instances", str(slots)]
    arguments += ["--stagger", "0"]  # what the schedule costs is measured
    process = subprocess.Popen(
        [sys.executable, "-m", "async_grpo.cli", *arguments, "--steps", str(steps), "--eval-every", "25"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm"},
        stdout=terminal,
        stderr=terminal,
    )
    try:
        wall_s, share = watch(process, folder / "outputs" / "sweep_tiny" / "slots.jsonl")
    finally:
        process.terminate()
        process.wait()
        os.close(terminal)
    records = read(folder / "outputs" / "sweep_tiny" / "slots.jsonl")
    if process.returncode != 0:
        sys.exit(f"the sweep failed: {json.dumps({name: one.why for name, one in records.items()})}")
    return Measured(wall_s, share, [one.seconds for one in records.values()])


def drain(screen: int) -> None:
    try:
        while os.read(screen, 1 << 16):
            pass
    except OSError:  # the other end is closed
        return


def watch(process: subprocess.Popen[bytes], ledger: Path) -> tuple[float, float]:
    """From the first start to the last end: seconds, and the share of a core that the process used."""
    seen, first, last = psutil.Process(process.pid), None, None
    while process.poll() is None:
        if ledger.exists() and any(one.state == RUNNING for one in read(ledger).values()):
            times = seen.cpu_times()
            last = (time.monotonic(), times.user + times.system)
            first = first or last
        time.sleep(0.1)
    assert first is not None and last is not None
    wall_s = last[0] - first[0]
    return wall_s, (last[1] - first[1]) / wall_s


def best_packing(seconds: list[float], slots: int) -> float:
    """The shortest time in which that many slots can do all of them: every division is tried."""
    divisions = product(range(slots), repeat=len(seconds))
    return min(
        max(sum(one for one, slot in zip(seconds, slots_of) if slot == place) for place in range(slots))
        for slots_of in divisions
    )


def packing(rounds: int, steps: int) -> list[Row]:
    ratios, own, shares, walls, plain, controls = [], [], [], [], [], [control_s()]
    for _ in range(rounds):
        plain.append(max(plain_loops(SLOTS)) / max(plain_loops(1)))
        with tempfile.TemporaryDirectory() as outputs:
            folders = [Path(outputs) / name for name in ("together", *map(str, SEEDS))]
            for folder in folders:
                folder.mkdir()
            together = sweep(folders[0], SEEDS, SLOTS, steps)
            controls.append(control_s())
            alone = [one_core(folder, seed, steps) for folder, seed in zip(folders[1:], SEEDS, strict=True)]
        best = best_packing(alone, SLOTS)
        ratios.append(together.wall_s / best)
        own.append(together.wall_s / best_packing(together.runs_s, SLOTS))
        shares.append(together.supervisor)
        walls.append(together.wall_s)
        controls.append(control_s())
    steady = partial(row, controls=controls)
    return [
        steady(f"4 runs in {SLOTS} slots, by the best packing of the same runs alone", ratios, "×", target="<= 1.03"),
        steady("the same, by the best packing of the times that they took in the sweep", own, "×"),
        steady(f"{SLOTS} plain loops of torch, a core each, by one alone", plain, "×"),
        steady("the same, from the first start to the last end", walls, "s"),
        row("the supervisor with its table, share of a core", shares, "", target="<= 0.01"),
    ]


def one_core(folder: Path, seed: int, steps: int) -> float:
    """The run alone, on one core like each run of the sweep."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        return sweep(folder, (seed,), 1, steps).runs_s[0]
    finally:
        os.sched_setaffinity(0, before)


def plain_loops(count: int) -> list[float]:
    """Seconds of each of `count` loops that run at once, one on each core."""
    loops = [
        subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, "-c", PLAIN_LOOP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for core in sorted(os.sched_getaffinity(0))[:count]
    ]
    for loop in loops:
        assert loop.stdout is not None and loop.stdout.readline() == "ready\n"
    for loop in loops:
        assert loop.stdin is not None
        loop.stdin.write("go\n")
        loop.stdin.flush()
    return [float(loop.communicate()[0]) for loop in loops]


def simulated(children: int) -> list[Row]:
    """Descriptors, processes and memory after many children that sleep."""
    me = psutil.Process()
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "slots.jsonl")
        run(ledger, Path(folder), "warm", children // 5)
        descriptors, memory, processes = me.num_fds(), me.memory_info().rss, len(me.children())
        started, cpu = time.monotonic(), sum(me.cpu_times()[:2])
        run(ledger, Path(folder), "run", children)
        took, cpu = time.monotonic() - started, sum(me.cpu_times()[:2]) - cpu
        assert sum(one.state == FINISHED for one in ledger.records.values()) == children + children // 5
    return [
        row(
            f"descriptors more after {children} simulated runs", [float(me.num_fds() - descriptors)], "", target="<= 0"
        ),
        row("processes more", [float(len(me.children()) - processes)], "", target="<= 0"),
        row("memory more, a run", [(me.memory_info().rss - memory) / children / 1e3], "kB", target="<= 2"),
        row("CPU time of the supervisor, a run", [cpu / children * 1e3], "ms"),
        row(f"runs a second in {PLACES} places, with each child's own start", [children / took], "1/s"),
    ]


def run(ledger: Ledger, folder: Path, name: str, children: int) -> None:
    def command(place: Place) -> Command:
        return Command(["sleep", "0.05"], os.environ, folder / "log")

    tasks = [Task(name=f"{name}{number}", command=command) for number in range(children)]
    TaskSchedule(tasks, [Place(name=str(number)) for number in range(PLACES)], ledger, say=lambda text: None).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="simulated runs only")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load: Any = os.getloadavg()
    measured = simulated(CHILDREN // 5 if options.quick else CHILDREN) + (
        [] if options.quick else packing(PAIRS, steps=60)
    )
    print(as_text(measured))
    if options.json:
        write_json(options.json, measured, load_before=load)


if __name__ == "__main__":
    main()
