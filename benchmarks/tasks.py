"""What training on several tasks reaches and costs. Accuracy and cost of PPO alone are those of `ppo.py`.

    python benchmarks/tasks.py [--only costs|accuracy|overhead|load] [--seeds N] [--json FILE] [--update-docs]

Three tasks of one model (`setups/three_tasks.py`) are trained with GRPO and with PPO, each with every `mtl`. Accuracy
is the probability of the right answer to problems that no run saw. The costs are CPU times and bytes, of sides that
take turns in this run. `--only` measures one part, and takes the other from FILE; `overhead` and `load`, parts of the
costs, are printed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import (
    ROOT,
    Row,
    as_markdown,
    as_text,
    describe_machine,
    interval_95,
    machine_line,
    row,
    update_docs,
    write_json,
)

STEPS = 100
KINDS, METHODS = ("GRPO", "PPO"), ("equal", "pcgrad", "proportional")
ROUNDS = 5  # of sides that take turns
ROWS = (54_400, 1_000_000)  # of the largest file of Guru's, and of a large one
DEMO_TOKENS, LONG_TOKENS = 4, 64  # of a completion, where the overhead of groups of one is measured
WIDE = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "head_dim": 96}
MOSTLY_WEIGHTS = {"shape": WIDE, "per_device_train_batch_size": 6, "num_generations": 2}  # few activations

Accuracies = dict[tuple[str, str], list[dict[str, float]]]  # by trainer and `mtl`, of each seed by task


@contextlib.contextmanager
def quiet_trainer(kind: str, mtl: str, **given: Any) -> Iterator[Any]:
    from benchmarks.setups import three_tasks

    from async_grpo.setup.trl_compat import repair_trl

    repair_trl()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        yield three_tasks.build_trainer(kind, mtl, Path(folder), **given)


# --- Accuracy


def accuracies(seeds: int) -> tuple[Accuracies, list[Row]]:
    """What all runs reach, and how far the gradients of tasks conflict in those with `pcgrad`."""
    from benchmarks.setups.three_tasks import held_out_accuracy

    found: Accuracies = {}
    conflicts: list[float] = []
    cosines: list[float] = []
    for seed, kind, mtl in product(range(1, seeds + 1), KINDS, METHODS):
        with quiet_trainer(kind, mtl, seed=seed, steps=STEPS) as trainer:
            trainer.train()
            reached = held_out_accuracy(trainer.model, trainer.processing_class)
            means = trainer.state.log_history[-1]  # of all steps: it has logged nothing before
        found.setdefault((kind, mtl), []).append(reached)
        if mtl == "pcgrad":
            conflicts.append(means["mtl/conflicts"])
            cosines.append(means["mtl/cosine_min"])
        print(f"seed {seed}, {kind}, {mtl}: {reached}", flush=True)
    return found, [
        row("pairs of tasks whose gradients conflict, mean of the steps with `pcgrad`", conflicts, "share"),
        row("smallest cosine of the gradients of two tasks, mean of these steps", cosines, ""),
    ]


def accuracy_table(found: Accuracies) -> list[str]:
    """Lines of Markdown: means by task with half the width of 95% intervals, and paired differences to `equal`."""
    tasks = list(next(iter(found.values()))[0])
    seeds = len(next(iter(found.values())))
    lines = [f"| {STEPS} steps, {seeds} seeds | {' | '.join(tasks)} |", "|" + "---|" * (1 + len(tasks))]
    for (kind, mtl), runs in found.items():
        shown = [with_interval([run[task] for run in runs]) for task in tasks]
        lines.append(f"| {kind}, `{mtl}` | {' | '.join(shown)} |")
    for kind, mtl in product(KINDS, METHODS[1:]):
        pairs = list(zip(found[kind, mtl], found[kind, "equal"], strict=True))
        shown = [difference([one[task] - other[task] for one, other in pairs]) for task in tasks]
        lines.append(f"| {kind}: `{mtl}` less `equal` | {' | '.join(shown)} |")
    return lines


def with_interval(values: list[float]) -> str:
    mean, half = interval_95(values)
    return f"{mean:.3f} ± {half:.3f}"


def difference(values: list[float]) -> str:
    mean, half = interval_95(values)
    return f"{mean:+.3f} ± {half:.3f}" + (", not told apart" if abs(mean) <= half else "")


# --- Costs


def step_cpu_s(mtl: str, steps: int = 15) -> float:
    """CPU seconds of a step, the median without the first three."""
    from transformers import TrainerCallback

    seconds: list[float] = []

    class Measure(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seconds.append(time.process_time() - self.started)

    with quiet_trainer("GRPO", mtl, seed=1, steps=steps) as trainer:
        trainer.add_callback(Measure())
        trainer.train()
    return statistics.median(seconds[3:])


def peak_bytes(mtl: str) -> dict[str, int]:
    """The most that torch allocates at a time, and what a dry run says of the whole, without activations."""
    from torch.profiler import ProfilerActivity, profile

    from async_grpo.checks.plan.memory import trainer_bytes
    from async_grpo.checks.plan.trainer_facts import describe
    from async_grpo.rundir.run_plan import RunPlan

    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
        quiet_trainer("GRPO", mtl, seed=1, steps=3, **MOSTLY_WEIGHTS) as trainer,
    ):
        said = trainer_bytes(describe(trainer, RunPlan(config=Path("setup.py"))))
        trainer.train()
    live = most = 0
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return {"peak": most, "said": said}


def load_rows(path: str) -> dict[str, float]:
    """Seconds and bytes of `load`."""
    from async_grpo.tasks import load

    before = _peak_rss()
    started = time.perf_counter()
    loaded = load(path)
    seconds = time.perf_counter() - started
    assert f"{len(loaded)}.parquet" in path
    return {"seconds": seconds, "bytes": _peak_rss() - before}


def _peak_rss() -> float:
    """Bytes of this program; `ru_maxrss` is also of the one that has started it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def write_rows(folder: str, count: int) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    question = "A train leaves at {} and another one {} minutes later, twice as fast. When do they meet? " * 6
    rows = [
        {
            "data_source": "math__generated",
            "prompt": [{"role": "user", "content": question.format(*[number] * 12)}],
            "ability": "math",
            "reward_model": json.dumps({"style": "rule", "ground_truth": str(number)}),
            "extra_info": json.dumps({"split": "train", "index": number, "original": {"level": number % 5}}),
        }
        for number in range(count)
    ]
    path = f"{folder}/{count}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def overhead_fraction(tokens: int, steps: int) -> float:
    """Median of the steps after the fifth, in a run of PPO with groups of one completion, on the demo's prompts.

    Args:
        tokens: of a completion, at most; those that are longer than the demo's answers have exactly as many.
    """
    setup = ROOT / "benchmarks" / "setups" / "ppo_of_ones.py"
    command = [sys.executable, "-m", "async_grpo.cli", "train", str(setup), "-n", "1", "--steps", str(steps)]
    if tokens != DEMO_TOKENS:
        command += ["--set", f"max_completion_length={tokens}"]
        command += ["--set", f"generation_kwargs={json.dumps({'min_new_tokens': tokens})}"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        entries = map(json.loads, (Path(folder) / "worker" / "metrics.jsonl").read_text().splitlines())
        found = [one["async/overhead_fraction"] for one in entries if one.get("async/overhead_fraction") is not None]
    return statistics.median(found[5:])


CHILDREN: dict[str, Callable[[str], Any]] = {"peak": peak_bytes, "load": load_rows, "step": step_cpu_s}


def child(what: str, of: str) -> Any:
    """What one process of its own measures."""
    command = [sys.executable, __file__, "--child", what, of]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def costs() -> list[Row]:
    steps = [(step_cpu_s("pcgrad"), step_cpu_s("equal")) for _ in range(ROUNDS)]
    peaks = {mtl: child("peak", mtl) for mtl in ("pcgrad", "equal")}
    more, said = (peaks["pcgrad"][what] - peaks["equal"][what] for what in ("peak", "said"))
    memory = {"target": "<= 1.05", "ok": abs(more / said - 1) <= 0.05}
    return [
        row("CPU time of a step with `pcgrad` over `equal`'s, 3 tasks", _ratios(steps), "times", target="<= 1.6"),
        row("memory that `pcgrad` adds to `equal`'s, over what `--dry-run` says", [more / said], "times", **memory),
        *loads(),
        *overheads(),
    ]


def loads() -> list[Row]:
    rows = []
    for count, target in zip(ROWS, ("<= 15", "<= 20"), strict=True):
        with tempfile.TemporaryDirectory() as folder:
            path = write_rows(folder, count)
            found = [child("load", path) for _ in range(3)]
        rows += [
            row(f"`load` of {count:,} rows", [one["seconds"] for one in found], "s", target=target),
            row(f"memory that `load` of {count:,} takes", [one["bytes"] / 1e9 for one in found], "GB", target="<= 1"),
        ]
    return rows


def overheads() -> list[Row]:
    found = [(overhead_fraction(DEMO_TOKENS, 40), overhead_fraction(LONG_TOKENS, 15)) for _ in range(3)]
    short, long = ([pair[side] for pair in found] for side in (0, 1))
    return [
        row(
            f"`async/overhead_fraction` of PPO with groups of one, {DEMO_TOKENS} tokens",
            short,
            "share",
            target="<= 0.1",
        ),
        row(f"the same, {LONG_TOKENS} tokens", long, "share"),
    ]


def page(rows: Iterable[Row], accuracy: Sequence[str], busy: float) -> str:
    """What the documentation has.

    Args:
        accuracy: the lines of its table.
        busy: load of the machine before the costs were measured.
    """
    head = f"{machine_line(describe_machine())}; load {busy:.1f} before"
    return "\n".join([head, "", as_markdown(rows), "", *accuracy])


def _ratios(pairs: list[tuple[float, float]]) -> list[float]:
    return [one / other for one, other in pairs]


ALONE = {"overhead": overheads, "load": loads}  # parts of the costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("costs", "accuracy", *ALONE))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--update-docs", action="store_true")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "OF"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        what, of = options.child
        print(json.dumps(CHILDREN[what](of)))
        return
    if options.only in ALONE:
        print(as_text(ALONE[options.only]()))
        return
    if options.only and not options.json:
        parser.error("--only takes the other part from --json FILE")
    before = json.loads(options.json.read_text()) if options.only else {"rows": []}
    rows = {one["name"]: Row(**one) for one in before["rows"]}
    if options.only == "accuracy":
        busy = before["load_before"]
    else:
        busy, measured = os.getloadavg()[0], costs()
        rows |= {one.name: one for one in measured}
        print(as_text(measured), flush=True)
    if options.only == "costs":
        accuracy = before["accuracy"]
    else:
        reached, measured = accuracies(options.seeds)
        rows |= {one.name: one for one in measured}
        accuracy = accuracy_table(reached)
        print(as_text(measured), *accuracy, sep="\n")
    if options.json:
        write_json(options.json, rows.values(), load_before=busy, accuracy=accuracy)
    if options.update_docs:
        update_docs("tasks", page(rows.values(), accuracy, busy))


if __name__ == "__main__":
    main()
