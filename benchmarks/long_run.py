"""Does a long run grow? 500 steps of the tiny recipe with 2 workers, sampled from outside, as a plot and a sentence.

    python benchmarks/long_run.py [--quick] [--steps N] [--json FILE] [--update-docs]

Every second, for the server, each worker and the launcher: memory (USS: what no other process shares), open files,
threads, CPU time; and the step times from `metrics.jsonl`. The first fifth of the run is left out: memory pools fill,
and the queue's archive reaches its first shard. What is left is fitted with a straight line; growth is claimed where
the whole 95% interval of the slope is above 0, and the line rises by more than 1% in 500 steps.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
from benchmarks.table import ROOT, Row, as_text, describe_machine, machine_line, row, update_docs, write_json

SETUP = ROOT / "src" / "app" / "trainer_setup_tiny.py"
PLOT = ROOT / "docs" / "images" / "long_run.png"
STEPS = 500
SAMPLE_S = 1.0
SETTLING = 0.2  # of the run, left out of the fits
RELEVANT = 0.01  # of the mean, over STEPS steps
DEADLINE_S = 1800.0
STRETCH = 10  # steps over which CPU time is averaged
CPU = "CPU time, ms a step"
BATCHES = 20  # means of so many parts are fitted, because neighbouring values depend on each other
T_975 = 2.101  # Student's t for BATCHES - 2 degrees of freedom


@dataclass(slots=True)
class Series:
    """One figure of one process over the run."""

    steps: list[float] = field(default_factory=list)  # optimizer steps done, between two log lines linearly
    values: list[float] = field(default_factory=list)

    def settled(self) -> list[tuple[float, float]]:
        first = SETTLING * max(self.steps)
        return [(step, value) for step, value in zip(self.steps, self.values, strict=True) if step >= first]

    def growth(self) -> tuple[float, float]:
        """Slope in units for STEPS steps, and half the width of its 95% interval."""
        points = [_mean_point(part) for part in _parts(self.settled(), BATCHES)]
        mean_x, mean_y = (statistics.mean(axis) for axis in zip(*points, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
        residual = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points) / (len(points) - 2)
        return slope * STEPS, T_975 * math.sqrt(residual / spread) * STEPS

    def verdict(self) -> tuple[bool, str]:
        """Whether it grows, and the sentence that says so."""
        slope, half = self.growth()
        mean = statistics.mean(value for _, value in self.settled())
        grows = slope - half > 0 and slope > RELEVANT * mean
        interval = f"{slope:+.3g} in {STEPS} steps (95% interval {slope - half:+.3g} .. {slope + half:+.3g})"
        return grows, f"{interval}, mean {mean:.4g}"


def _parts(points: Sequence[tuple[float, float]], count: int) -> Iterator[Sequence[tuple[float, float]]]:
    for part in range(count):
        chosen = points[part * len(points) // count : (part + 1) * len(points) // count]
        if chosen:
            yield chosen


def _mean_point(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.mean(x for x, _ in points), statistics.mean(y for _, y in points)


# --- The run ----------------------------------------------------------------------------------------------


def run(folder: Path, steps: int) -> dict[str, dict[str, Series]]:
    """Series by figure and process: `{"memory": {"server": …, "worker 1": …}, "open files": …, "step time": …}`."""
    run_dir = folder / "run"
    where = ["--master-device-id", "cpu", "--num-workers", "2", "--run-dir", str(run_dir), "--steps", str(steps)]
    command = [sys.executable, "-m", "async_grpo.cli", "train", str(SETUP), *where]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    times: list[tuple[float, dict[str, dict[str, float]]]] = []
    logged: list[tuple[float, int]] = []  # when this many steps had been logged
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + DEADLINE_S
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{steps} steps were not done after {DEADLINE_S:.0f} s")
                times.append((time.monotonic(), sample(process.pid)))
                logged.append((time.monotonic(), _steps_done(run_dir)))
                time.sleep(SAMPLE_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=30)
    if process.returncode != 0:
        last_words = (folder / "log.txt").read_text(errors="replace").splitlines()[-20:]
        raise RuntimeError("\n".join([f"the run ended with exit code {process.returncode}:", *last_words]))
    return _as_series(times, logged, run_dir)


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


def _steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return sum('"loss"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def _as_series(
    times: list[tuple[float, dict[str, dict[str, float]]]], logged: list[tuple[float, int]], run_dir: Path
) -> dict[str, dict[str, Series]]:
    series: dict[str, dict[str, Series]] = {}
    last = max(steps for _, steps in logged)
    for (_, figures), (_, steps) in zip(times, logged, strict=True):
        if not 0 < steps < last:  # loading, or ending
            continue
        for figure, processes in figures.items():
            for name, value in processes.items():
                one = series.setdefault(figure, {}).setdefault(name, Series())
                one.steps.append(steps)
                one.values.append(value)
    series[CPU] = {name: _per_step(one) for name, one in series[CPU].items()}
    entries = [entry for entry in map(json.loads, _lines(run_dir / "metrics.jsonl")) if "loss" in entry]
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


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# --- What comes of it -------------------------------------------------------------------------------------


def rows_of(series: dict[str, dict[str, Series]]) -> Iterator[Row]:
    for figure, processes in series.items():
        for name, one in processes.items():
            grows, sentence = one.verdict()
            values = [value for _, value in one.settled()]
            what, _, unit = figure.partition(", ")
            yield row(f"{name}: {what}", values, unit, ok=not grows, note=sentence)


def conclusion(rows: Sequence[Row], steps: int) -> str:
    growing = [one.name for one in rows if one.ok is False]
    if not growing:
        return (
            f"{steps} steps of the tiny recipe with 2 workers: no growth of memory, open files, threads or step time."
        )
    return f"{steps} steps of the tiny recipe with 2 workers: growth of {'; '.join(growing)}."


def plot(series: dict[str, dict[str, Series]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(series), 1, figsize=(8, 2.2 * len(series)), sharex=True, layout="constrained")
    for axis, (name, processes) in zip(axes, series.items(), strict=True):
        for process, one in processes.items():
            axis.plot(one.steps, one.values, label=process, linewidth=1)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axes[0].legend(loc="center left", bbox_to_anchor=(1, 0.5))
    axes[-1].set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 steps: half a minute")
    parser.add_argument("--steps", type=int, help=f"how many (default: {STEPS})")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--update-docs", action="store_true", help="put the plot and the table into the documentation")
    args = parser.parse_args()
    steps = args.steps or (100 if args.quick else STEPS)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        series = run(Path(folder), steps)
    took_s = time.monotonic() - started
    rows = list(rows_of(series))
    print(as_text(rows))
    verdict = f"{conclusion(rows, steps)} {machine_line(describe_machine())}; {took_s:.0f} s."
    print(verdict)
    if args.json:
        write_json(args.json, rows, seconds=round(took_s))
    if args.update_docs:
        plot(series, PLOT)
        notes = "\n".join(f"| {one.name} | {one.note} | {'no' if one.ok else 'yes'} |" for one in rows)
        head = "| what | change | grows |\n|---|---|---|"
        picture = "![Memory, open files, threads and step time over the run](images/long_run.png)"
        update_docs("long_run", f"{verdict}\n\n{picture}\n\n{head}\n{notes}")


if __name__ == "__main__":
    main()
