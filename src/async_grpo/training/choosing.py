"""Rows of the dataset chosen before they are generated, by the chance that the rewards of their group differ.

Each row has a Beta posterior of success, from which a probability is drawn (MoPPS, arXiv 2507.04632). A row is skipped
with a probability, never for good (GRESO, arXiv 2506.02177). The rows of a task come in the order of TRL's sampler, and
the task of each job is that of the row that the sampler has at its place. `chosen.jsonl` has each choice: a resumed run
issues every job with the row that it had.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from async_grpo.archive.rollout_state import RolloutState, RowCounts
from async_grpo.errors import RunDirError, UsageError
from async_grpo.records import RolloutGroup, seed_from
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.shape import shaped_lines
from async_grpo.setup.algorithm import compares_groups
from async_grpo.setup.overrides import own_dataloader
from async_grpo.training import trl_trainer
from async_grpo.training.job_issuer import task_of
from async_grpo.training.prompts import row_indices

if TYPE_CHECKING:
    from trl import GRPOTrainer

PRIOR = 0.25  # of both counts: most rows are nearly always, or hardly ever, solved, so one group says much
DECAY = 0.8  # of a row's counts with each of its groups: the policy changes
FLOOR = 0.05  # the least chance with which a row is taken


def counted_in(counts: RowCounts, group: RolloutGroup, *, varied: bool) -> RowCounts:
    """Return the decayed counts of a row after one more group, whose rewards `varied` or not.

    Completions are counted as long as rewards are 0 or 1. The first other reward clears the counts, and from then on
    groups are counted: one whose rewards differ is a success.
    """
    rewards_G = group.rewards.sum(axis=1)
    won, of = float(rewards_G.sum()), float(len(rewards_G))
    graded = counts.graded or not np.isin(rewards_G, (0.0, 1.0)).all() or varied != (0 < won < of)
    won, of = (float(varied), 1.0) if graded else (won, of)
    kept = DECAY if graded == counts.graded else 0.0
    return RowCounts(counts.row, kept * counts.successes + won, kept * counts.failures + of - won, graded)


def drawn_chance(counts: RowCounts, num_generations: int, randomness: random.Random) -> float:
    """Draw a probability of success p, and return the chance that rewards differ: 1 - p^G - (1 - p)^G; graded, p."""
    p = randomness.betavariate(PRIOR + counts.successes, PRIOR + counts.failures)
    return p if counts.graded else 1 - p**num_generations - (1 - p) ** num_generations


def refuse_choosing(trainer: GRPOTrainer) -> None:
    """Raise `UsageError` where rows have no known place in a dataset, or groups of equal rewards teach too."""
    if not compares_groups(trainer):
        why = f"{type(trainer).__name__} learns from groups of equal rewards too. Leave it out."
    elif (loader := own_dataloader(trainer)) or not hasattr(trainer.train_dataset, "__len__"):
        why = f"it knows rows by their place in the dataset, which {loader or 'a stream'} hides. Leave one of them out."
    else:
        return
    raise UsageError(f"--choose-prompts cannot choose here: {why}")


def _tasks_of(dataset: Any) -> list[str]:
    has_tasks = "task" in (getattr(dataset, "column_names", None) or ())
    return [task_of({"task": task}) for task in dataset["task"][:]] if has_tasks else [""] * len(dataset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A line of `chosen.jsonl`."""

    seq: int  # of the job
    row: int  # index in the dataset
    skipped: int  # rows of its task since the one before


class PromptChooser:
    """Chooses the row of each job, in the order of issue.

    Args:
        record: the file of choices; what an earlier process of the run chose is there.
        ahead: rows are chosen so many jobs ahead of the groups that were learned of: then a choice depends on these
            groups alone, not on when its job is issued.
        resume_from: has what was known of the rows.

    Raises:
        RunDirError: the record is not whole, or the data have fewer rows than it names.
    """

    def __init__(
        self, trainer: GRPOTrainer, record: Path, *, ahead: int = 0, resume_from: RolloutState | None = None
    ) -> None:
        self._trainer = trainer
        self._teaches_nothing = trl_trainer.uniform_rewards(trainer)
        self._tasks = _tasks_of(trainer.train_dataset)
        before = list(shaped_lines(Choice, record))
        is_whole = len(before) >= (resume_from.next_seq if resume_from else 0)
        if not is_whole or any(one.seq != seq or one.row >= len(self._tasks) for seq, one in enumerate(before)):
            raise RunDirError(
                f"{record}, which has the row of each job, is damaged, or the training data have lost rows. Put both "
                "back as they were, or begin another run with --run-dir OTHER."
            )
        self._counts = {one.row: one for one in resume_from.row_counts} if resume_from else {}
        self._reserve = ahead + (resume_from.consumed_groups if resume_from else 0)  # choices that wait for no group
        self._chosen = [one.row for one in before]
        self._passed = Counter(self._tasks[one.row] for one in before for _ in range(1 + one.skipped))
        self._rows_of: dict[str, Iterator[int]] = {}
        self._places = islice(row_indices(trainer), len(before), None)
        self._record = LineFile(record)
        self.sync, self.close = self._record.sync, self._record.close

    def counts(self) -> list[RowCounts]:
        """What is known of the rows that had groups."""
        return [self._counts[row] for row in sorted(self._counts)]

    def rows(self, start: int = 0) -> Iterator[int]:
        """Yield the row index of each job from job `start` on, without end."""
        for seq in count(start):
            self._choose_until(max(seq + 1, self._reserve))
            yield self._chosen[seq]

    def learn(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the rewards of groups that were taken or left out."""
        for group in groups:
            row = self._chosen[group.job.seq]
            counts = self._counts.get(row, RowCounts(row))
            self._counts[row] = counted_in(counts, group, varied=not self._teaches_nothing(group))
        self._reserve += len(groups)
        self._choose_until(self._reserve)

    def _choose_until(self, jobs: int) -> None:
        while len(self._chosen) < jobs:
            choice = self._choose(len(self._chosen), self._tasks[next(self._places)])
            self._chosen.append(choice.row)
            self._record.append(json.dumps(asdict(choice)))
            trl_trainer.append_metric(self._trainer, "async/rows_skipped", choice.skipped)

    def _choose(self, seq: int, task: str) -> Choice:
        if task not in self._rows_of:
            of_task = (row for row in row_indices(self._trainer) if self._tasks[row] == task)
            self._rows_of[task] = islice(of_task, self._passed[task], None)
        randomness = random.Random(seed_from(f"{self._trainer.args.seed}:{seq}:row"))
        skipped = 0
        while randomness.random() >= self._chance(row := next(self._rows_of[task]), randomness):
            skipped += 1
        return Choice(seq=seq, row=row, skipped=skipped)

    def _chance(self, row: int, randomness: random.Random) -> float:
        known = self._counts.get(row)
        return max(FLOOR, drawn_chance(known, self._trainer.num_generations, randomness)) if known else 1.0
