"""Does a long run grow? Five runs of 1,500 steps of the tiny recipe with 2 workers, sampled from outside; a plot and a
sentence.

    python benchmarks/long_run.py [--quick] [--runs N] [--steps N] [--json FILE] [--update-docs]

Every second, for the server, each worker and the launcher: memory (USS: what no other process shares), open files,
threads, CPU time; and the step times from `metrics.jsonl`. The first fifth of a run is left out: memory pools fill, and
the queue's archive reaches its first shard. The slope of what is left is Theil and Sen's (the median of the slopes of
all pairs): a leak has one, a single step has none. Growth is claimed where the 95% interval of the mean slope over the
runs is above 0, and the mean more than 1% in 500 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from benchmarks.table import (
    ROOT,
    Row,
    as_text,
    cells,
    describe_machine,
    interval_95,
    machine_line,
    row,
    update_docs,
    write_json,
)

SETUP = ROOT / "src" / "app" / "trainer_setup_tiny.py"
PLOT = ROOT / "docs" / "images" / "long_run.png"
STEPS = 500  # that a slope is told for
LENGTH = 3 * STEPS  # of a run: a worker's memory is that of its largest batch so far, which may come late
RUNS = 5
SAMPLE_S = 1.0
SETTLING = 0.2  # of the run, left out of the fits
RELEVANT = 0.01  # of the mean, in STEPS steps
DEADLINE_S = 1800.0
STRETCH = 10  # steps over which CPU time is averaged
CPU = "CPU time, ms a step"
PARTS = 20  # means of this many parts are fitted, because neighbouring values depend on each other
COLOURS = {"server": "C0", "launcher": "C1", "worker 1": "C2", "worker 2": "C3"}


@dataclass(slots=True)
class Series:
    """One figure of one process over one run."""

    steps: list[float] = field(default_factory=list)  # optimizer steps done, between two log lines linearly
    values: list[float] = field(default_factory=list)

    def settled(self) -> list[tuple[float, float]]:
        first = SETTLING * max(self.steps)
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if step >= first]

    def slope(self) -> float:
        """In units for STEPS steps."""
        points = [_mean_point(part) for part in _parts(self.settled(), PARTS)]
        slopes = ((later[1] - first[1]) / (later[0] - first[0]) for first, later in combinations(points, 2))
        return STEPS * statistics.median(slopes)


Run = dict[str, dict[str, Series]]  # figure -> process -> series


def _parts(points: Sequence[tuple[float, float]], count: int) -> Iterator[Sequence[tuple[float, float]]]:
    for part in range(count):
        chosen = points[part * len(points) // count : (part + 1) * len(points) // count]
        if chosen:
            yield chosen


def _mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)


# --- The run ----------------------------------------------------------------------------------------------


def run(folder: Path, steps: int) -> Run:
    """Series by figure and process: `{"memory": {"server": …, "worker 1": …}, "open files": …, "step time": …}`."""
    run_dir = folder / "run"
    where = ["--master-device-id", "cpu", "--num-workers", "2", "--run-dir", str(run_dir), "--steps", str(steps)]
    command = [sys.executable, "-m", "async_grpo.cli", "train", str(SETUP), *where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    samples: list[tuple[int, dict[str, dict[str, float]]]] = []  # with the steps that had been logged
    steps_done = StepsDone(run_dir / "metrics.jsonl")
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{steps} steps were not done after {DEADLINE_S:.0f} s")
                samples.append((steps_done(), sample(process.pid)))
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode != 0:
        last_words = (folder / "log.txt").read_text(errors="replace").splitlines()[-20:]
        raise RuntimeError("\n".join([f"the run ended with exit code {process.returncode}:", *last_words]))
    return _as_series(samples, run_dir / "metrics.jsonl")


def sample(launcher: int) -> dict[str, dict[str, float]]:
    """`{figure: {process: value}}` of the launcher and its children, now."""
    found: dict[str, dict[str, float]] = {}
    with suppress(psutil.Error):
        parent = psutil.Process(launcher)
        for process in (parent, *parent.children()):
            with suppress(psutil.Error, ValueError):
                name = _role(process.cmdline())
                figures = {
                    "memory, MB": process.memory_full_info().uss / 1e6,
                    "open files": float(process.num_fds()),
                    "threads": float(process.num_threads()),
                    CPU: 1e3 * sum(process.cpu_times()[:2]),
                }
                for figure, value in figures.items():
                    found.setdefault(figure, {})[name] = value
    return found


def _role(command: list[str]) -> str:
    words = command[command.index("async_grpo.cli") + 1 :]
    role = {"train": "launcher"}.get(words[0], words[0])
    return f"{role} {words[words.index('--id') + 1]}" if role == "worker" else role


class StepsDone:
    """Counts the steps in `metrics.jsonl`; each call reads what is new, so that looking costs the same all along."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = self._steps = 0

    def __call__(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._position += len(whole)
            self._steps += sum(b'"loss"' in line for line in whole.splitlines())
        return self._steps


def _as_series(samples: list[tuple[int, dict[str, dict[str, float]]]], metrics: Path) -> Run:
    series: Run = {}
    last = max(steps for steps, _ in samples)
    for steps, figures in samples:
        if not 0 < steps < last:  # loading, or ending
            continue
        for figure, processes in figures.items():
            for name, value in processes.items():
                one = series.setdefault(figure, {}).setdefault(name, Series())
                one.steps.append(steps)
                one.values.append(value)
    series[CPU] = {name: _per_step(one) for name, one in series[CPU].items()}
    entries = [entry for entry in map(json.loads, metrics.read_text().splitlines()) if "loss" in entry]
    step_time = Series([entry["step"] for entry in entries[1:]], [1e3 * entry["step_time"] for entry in entries[1:]])
    series["step time, ms"] = {"server": step_time}
    return series


def _per_step(total: Series) -> Series:
    """From what was used so far to what one step used, over stretches of some steps."""
    result, before = Series(), (total.steps[0], total.values[0])
    for step, value in zip(total.steps, total.values, strict=True):
        if step >= before[0] + STRETCH:
            result.steps.append((before[0] + step) / 2)
            result.values.append((value - before[1]) / (step - before[0]))
            before = (step, value)
    return result


# --- What comes of it -------------------------------------------------------------------------------------


def rows_of(runs: Sequence[Run]) -> Iterator[Row]:
    """A row for each figure of each process: its slope in every run."""
    for figure, processes in runs[0].items():
        for name in processes:
            series = [one[figure][name] for one in runs]
            slopes = [one.slope() for one in series]
            mean, half = interval_95(slopes)
            values = [value for one in series for _, value in one.settled()]
            level = statistics.mean(values)
            what, _, unit = figure.partition(", ")
            grows = mean - half > 0 and mean > RELEVANT * level
            note = f"95% interval {mean - half:+.3g} .. {mean + half:+.3g}; "
            note += f"level {level:.4g}, {min(values):.4g} .. {max(values):.4g}"
            yield row(f"{name}: {what}", slopes, f"{unit} in {STEPS} steps".strip(), ok=not grows, note=note)


def conclusion(rows: Sequence[Row], runs: int, steps: int) -> str:
    growing = [one.name for one in rows if one.ok is False]
    found = f"growth of {'; '.join(growing)}" if growing else "no growth of memory, open files, threads or step time"
    return f"{runs} runs of {steps} steps of the tiny recipe with 2 workers: {found}."


def plot(runs: Sequence[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = len(runs[0])
    figure, axes = pyplot.subplots(rows, 1, figsize=(8, 2.2 * rows), sharex=True, layout="constrained")
    for axis, name in zip(axes, runs[0], strict=True):
        for number, one in enumerate(runs):
            for process, series in one[name].items():
                label = process if number == 0 else None
                axis.plot(series.steps, series.values, label=label, color=COLOURS[process], linewidth=0.8)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes[-1].set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two runs of 100 steps: a minute")
    parser.add_argument("--runs", type=int, default=RUNS, help=f"how many (default: {RUNS})")
    parser.add_argument("--steps", type=int, default=LENGTH, help=f"of each (default: {LENGTH})")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--update-docs", action="store_true", help="put the plot and the table into the documentation")
    args = parser.parse_args()
    count, steps = (2, 100) if args.quick else (args.runs, args.steps)
    started = time.monotonic()
    runs = []
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
            runs.append(run(Path(folder), steps))
        print(f"run {number + 1} of {count} done, {time.monotonic() - started:.0f} s", file=sys.stderr)
    rows = list(rows_of(runs))
    print(as_text(rows))
    took = f"{time.monotonic() - started:.0f} s"
    verdict = f"{conclusion(rows, count, steps)} {machine_line(describe_machine())}; {took}."
    print(verdict)
    if args.json:
        write_json(args.json, rows)
    if args.update_docs:
        plot(runs, PLOT)
        picture = "![Memory, open files, threads and step time over the runs](images/long_run.png)"
        head = (
            f"| what | change in {STEPS} steps: least .. median .. most | mean, and level | grows |\n|---|---|---|---|"
        )
        lines = [f"| {one.name} | {cells(one)[-1]} | {one.note} | {'no' if one.ok else 'yes'} |" for one in rows]
        update_docs("long_run", "\n\n".join([verdict, picture, "\n".join([head, *lines])]))


if __name__ == "__main__":
    main()
