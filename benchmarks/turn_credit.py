"""What credit for each turn does for a model that learns to search: exact match on facts held out from training.

    python benchmarks/turn_credit.py [--task chain] [--quick] [--json FILE] [--update-docs]
    python benchmarks/turn_credit.py --cells FILE --minutes 10       again and again, until all cells are there

Task, model and warm start are those of `setups/facts.py`, where one search is needed, or of `setups/chain.py`, where
three are, each for what the one before found. `outcome` (GRPO-OR), `merged` (GRPO-MR), `turn` (MT-GRPO) and, for three,
`reward_to_go` train with the same seeds, each training run in one process on one core, in TRL alone. Answers are
sampled at temperature 1, eight to each of 40 questions that no training run saw. The control is the trained model whose
search finds none of the facts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # one training run a core
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cells import keep, outcomes, read_outcomes
from benchmarks.table import (
    Row,
    describe_machine,
    interval_95,
    machine_line,
    row,
    update_docs,
    write_json,
)

from async_grpo.formatting import counted

SEEDS = (1, 2, 3, 4, 5)
EVALUATED_EVERY = 10  # steps
REACHED = 0.8  # exact match


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A module of `benchmarks.setups`, and what of it is shown."""

    credits: tuple[str, ...]
    steps: int
    called: str  # what its reward `called` measures
    docs: str  # the name of its marks in docs/
    targets: dict[str, str]  # of the exact match


TASKS = {
    "facts": Task(
        credits=("outcome", "merged", "turn"),
        steps=40,
        called="tool rate",
        docs="turn-credit",
        targets={"turn": f">= {REACHED}"},
    ),
    "chain": Task(
        credits=("outcome", "merged", "turn", "reward_to_go"),
        steps=20,
        called="share of links found",
        docs="turn-credit-chain",
        targets={},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run."""

    task: str = "facts"
    credit: str
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """On the questions that are held out."""

    step: int
    seconds: float  # of CPU time in training until then, evaluations left out
    tool_rate: float  # what the task's reward `called` measures
    exact_match: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    curve: list[Measured]  # before training, and every `EVALUATED_EVERY` steps
    without_search: float  # exact match of the trained model whose search finds none of the facts
    warm_start_s: float  # once, for all

    def __post_init__(self) -> None:
        curve = [point if isinstance(point, Measured) else Measured(**point) for point in self.curve]
        object.__setattr__(self, "curve", curve)

    @property
    def last(self) -> Measured:
        return self.curve[-1]

    def seconds_to(self, exact_match: float) -> float:
        """Seconds of training, the warm start counted; infinite where it was not reached."""
        reached = (point.seconds for point in self.curve if point.exact_match >= exact_match)
        return self.warm_start_s + next(reached, math.inf)


# --- One run ----------------------------------------------------------------------------------------------


def train(cell: Cell) -> Outcome:
    with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as folder:
        import torch
        from transformers import TrainerCallback
        from transformers.utils import logging

        from async_grpo.setup.trl_compat import repair_trl

        torch.set_num_threads(1)
        logging.set_verbosity_error()
        repair_trl()
        setup = importlib.import_module(f"benchmarks.setups.{cell.task}")
        trainer, warm_start_s = setup.build_trainer(Path(folder), cell.credit, cell.seed, cell.steps)
        curve = [_measured(trainer, 0, 0.0)]

        class Evaluating(TrainerCallback):
            started, spent = 0.0, 0.0

            def on_train_begin(self, *_: Any, **__: Any) -> None:
                self.started = time.process_time()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % EVALUATED_EVERY == 0:
                    begun = time.process_time()
                    curve.append(_measured(trainer, state.global_step, begun - self.started - self.spent))
                    self.spent += time.process_time() - begun

        trainer.add_callback(Evaluating())
        trainer.train()
        with setup.elsewhere():
            without_search = _measured(trainer, cell.steps, 0.0).exact_match
    return Outcome(cell=cell, curve=curve, without_search=without_search, warm_start_s=warm_start_s)


def _measured(trainer: Any, step: int, seconds: float) -> Measured:
    trainer.evaluate()
    found = next(entry for entry in reversed(trainer.state.log_history) if "eval_loss" in entry)
    return Measured(
        step=step,
        seconds=seconds,
        tool_rate=found["eval_rewards/outcome/called/mean"],
        exact_match=found["eval_rewards/outcome/exact_match/mean"],
    )


# --- The table --------------------------------------------------------------------------------------------


def by_credit(done: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    credits = TASKS[done[0].cell.task].credits
    found = {credit: [one for one in done if one.cell.credit == credit] for credit in credits}
    return {credit: sorted(ones, key=lambda one: one.cell.seed) for credit, ones in found.items() if ones}


def rows(done: Sequence[Outcome]) -> Iterator[Row]:
    task = TASKS[done[0].cell.task]
    for credit, ones in by_credit(done).items():
        exact = [one.last.exact_match for one in ones]
        target = task.targets.get(credit, "")
        yield row(f"exact match, {credit}", exact, "", target=target, note=_interval(exact))
        yield row(f"{task.called}, {credit}", [one.last.tool_rate for one in ones], "")
        yield row(
            f"exact match without the search, {credit}", [one.without_search for one in ones], "", target="<= 0.02"
        )
        seconds = [one.seconds_to(REACHED) for one in ones]
        if all(map(math.isfinite, seconds)):
            yield row(f"CPU time to {REACHED}, {credit}", [each / 60 for each in seconds], "min", target="< 15")


def table(done: Sequence[Outcome]) -> str:
    """Markdown: mean ± half of the 95% interval over seeds, or each seed's where there are one or two."""
    credits = by_credit(done)
    shown = [point.step for point in done[0].curve][1:]
    head = ["`credit`", *(f"exact match, step {step}" for step in shown)]
    head += [TASKS[done[0].cell.task].called, "without the search"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for credit, ones in credits.items():
        matches = [[point.exact_match for one in ones for point in one.curve if point.step == step] for step in shown]
        rest = [[one.last.tool_rate for one in ones], [one.without_search for one in ones]]
        lines.append(f"| `{credit}` | {' | '.join(map(_interval, [*matches, *rest]))} |")
    return "\n".join(lines)


def findings(done: Sequence[Outcome]) -> Iterator[str]:
    """`turn` compared with each other credit after the last step, seed by seed."""
    credits = by_credit(done)
    for credit, ones in credits.items():
        gains = _gains(credits.get("turn", []), ones)
        if credit != "turn" and len(gains) > 2:
            mean, half = interval_95(gains)
            verdict = "better" if mean > half else "worse" if -mean > half else "not told apart"
            yield f"`turn` less `{credit}`, exact match: {mean:+.3f} ± {half:.3f}, {verdict}."


def _gains(turn: Sequence[Outcome], other: Sequence[Outcome]) -> list[float]:
    """Subtract the exact match of the other rule, for the seeds that both have."""
    matches = {one.cell.seed: one.last.exact_match for one in other}
    return [one.last.exact_match - matches[one.cell.seed] for one in turn if one.cell.seed in matches]


def _interval(values: Sequence[float]) -> str:
    if len(values) < 3:  # an interval of two says less than they do
        return ", ".join(f"{value:.3f}" for value in values)
    mean, half = interval_95(values)
    return f"{mean:.3f} ± {half:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="facts", help="one search (facts), or three (chain)")
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps")
    parser.add_argument("--cells", type=Path, help="each training run is kept in this file, and not repeated")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training run after so many minutes")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--update-docs", action="store_true", help="put table and findings into the documentation")
    args = parser.parse_args()
    seeds, steps = (SEEDS[:1], 20) if args.quick else (SEEDS, TASKS[args.task].steps)
    credits = TASKS[args.task].credits
    cells = [Cell(task=args.task, credit=credit, seed=seed, steps=steps) for seed in seeds for credit in credits]
    found = {one.cell: one for one in read_outcomes(args.cells, Outcome, Cell)}
    done = [found[cell] for cell in cells if cell in found]
    left = [cell for cell in cells if cell not in {one.cell for one in done}]
    for one in outcomes(train, left, processes=args.processes, until=time.monotonic() + 60 * args.minutes):
        done.append(one)
        keep(args.cells, one)
        print(f"{one.cell} {one.last} without the search {one.without_search:.3f}", file=sys.stderr, flush=True)
    if done:
        report(done, args, of=len(cells))


def report(done: Sequence[Outcome], args: Any, *, of: int) -> None:
    task = TASKS[args.task]
    before = statistics.mean(one.curve[0].exact_match for one in done)
    calling = statistics.mean(one.curve[0].tool_rate for one in done)
    each = statistics.median(one.last.seconds for one in done)
    seeds = min(map(len, by_credit(done).values()))
    unfinished = "" if len(done) == of else f" {len(done)} of {of} training runs are done."
    told = (
        f"{machine_line(describe_machine())}; {done[0].cell.steps} steps, {counted(seeds, 'seed')}; mean ± half of the "
        f"95% interval over seeds, or each where there are one or two. Before training: exact match {before:.3f}, "
        f"{task.called} {calling:.3f}. A training run took {each:.0f} s of CPU time on one core, the warm start "
        f"{done[0].warm_start_s:.0f} s, once.{unfinished}"
    )
    listed = "\n".join(f"- {text}" for text in findings(done))
    print(f"{told}\n\n{table(done)}\n\n{listed}")
    if args.json:
        write_json(args.json, rows(done), steps=done[0].cell.steps, seeds=seeds, before=before)
    if args.update_docs:
        update_docs(task.docs, f"{told}\n\n{table(done)}\n\n{listed}")


if __name__ == "__main__":
    main()
