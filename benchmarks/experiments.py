"""What the queue of an experiment costs: the time of its graph in few places, and its own work. No stage is trained.

    python benchmarks/experiments.py [--json FILE]

24 jobs in 12 lines of 2 rounds, whose stages are children that sleep 1 to 8 s, in 2 and in 8 places, against the larger
of work / places and the longest path, plus .2 s for each start of a place.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import Row, as_text, row, write_json

from async_grpo_experiments.slots.ledger import FINISHED, Ledger
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule

LINES, ROUNDS, SEEDS = 12, 2, 3
PLACES = (2, 8)
START_S = 0.2


def graph(seed: int) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Seconds and needs of each stage: train of a round needs its generate, and generate the train before."""
    draw, found = random.Random(seed), dict[str, tuple[float, tuple[str, ...]]]()
    for line in range(LINES):
        before: tuple[str, ...] = ()
        for number in range(1, ROUNDS + 1):
            job = f"line{line}_r{number}"
            whole = draw.uniform(1, 8)  # of the job
            for kind, part in (("generate", 0.5), ("train", 0.3), ("evaluate", 0.2)):
                needs = before if kind == "generate" else (f"{job}.{'train' if kind == 'evaluate' else 'generate'}",)
                found[f"{job}.{kind}"] = (whole * part, needs)
            before = (f"{job}.train",)
    return found


def longest(stages: dict[str, tuple[float, tuple[str, ...]]]) -> dict[str, float]:
    """The longest path from each stage to an end, in seconds."""
    found = {name: seconds for name, (seconds, _) in stages.items()}
    for name in reversed(stages):
        for need in stages[name][1]:
            found[need] = max(found[need], stages[need][0] + found[name])
    return found


def run(stages: dict[str, tuple[float, tuple[str, ...]]], places: int, folder: Path) -> tuple[float, float]:
    """Seconds of the whole, and the share of a core that the queue had."""

    def task(name: str, seconds: float, needs: tuple[str, ...], priority: float) -> Task:
        command = Command(["sleep", f"{seconds:.3f}"], os.environ, folder / f"{name}.log")
        return Task(name=name, command=lambda place: command, needs=needs, priority=priority)

    ahead = longest(stages)
    tasks = [task(name, seconds, needs, ahead[name]) for name, (seconds, needs) in stages.items()]
    ledger, me = Ledger(folder / "slots.jsonl"), psutil.Process()
    started, cpu = time.monotonic(), sum(me.cpu_times()[:2])
    TaskSchedule(tasks, [Place(name=str(n)) for n in range(places)], ledger, say=lambda text: None).run()
    took, cpu = time.monotonic() - started, sum(me.cpu_times()[:2]) - cpu
    assert all(record.state == FINISHED for record in ledger.records.values())
    ledger.close()
    return took, cpu / took


def measured() -> list[Row]:
    rows: list[Row] = []
    for places in PLACES:
        factors, shares = [], []
        for seed in range(SEEDS):
            stages = graph(seed)
            work, path = sum(seconds for seconds, _ in stages.values()), max(longest(stages).values())
            with tempfile.TemporaryDirectory() as folder:
                took, share = run(stages, places, Path(folder))
            factors.append((took - START_S * len(stages) / places) / max(work / places, path))
            shares.append(100 * share)
        name = f"{LINES * ROUNDS} jobs in {places} places"
        rows.append(row(f"{name}, less {START_S} s a start: multiple of the bound", factors, "", target="<= 1.15"))
        rows.append(row(f"{name}: the queue, of a core", shares, "%", target="<= 3"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load: Any = os.getloadavg()
    found = measured()
    print(as_text(found))
    if options.json:
        write_json(options.json, found, load_before=load)


if __name__ == "__main__":
    main()
