"""Turns the prompts of a run into jobs, in order, and waits with them while the disk is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import DiskFullError
from async_grpo.log import logger
from async_grpo.queue import ServerQueue
from async_grpo.records import Job, seed_from

if TYPE_CHECKING:  # these import torch
    from async_grpo.training.checkpoints import UsedGroups


class SeenOfTrainer(NamedTuple):
    """What jobs say of the trainer."""

    sampling: dict[str, Any]
    state: dict[str, Any]


class JobIssuer:
    """Submits one job after the other to `queue`.

    Args:
        prompts: dataset rows in the order of issue, without end, from the first that is not consumed.
        trainer_state: what reward functions are to see of the trainer, as it is now.
        sampling: what is to be sampled with by now, where that is not what the setup file says.
        archive: makes space when the disk is full.
        resume_from: everything that this checkpoint does not have is issued again, and the queue gives back what was
            generated of it.
    """

    def __init__(
        self,
        queue: ServerQueue,
        prompts: Iterator[dict[str, Any]],
        *,
        run_id: str,
        seed: int,
        num_generations: int,
        trainer_state: Callable[[], dict[str, Any]] = dict,
        sampling: Callable[[], dict[str, Any]] = dict,
        archive: UsedGroups,
        resume_from: RolloutState | None = None,
    ) -> None:
        self._queue = queue
        self._prompts = prompts
        self.run_id = run_id
        self._seed = seed
        self._num_generations = num_generations
        self._trainer_state, self._sampling = trainer_state, sampling
        self._archive = archive
        self.next_seq = resume_from.consumed_below if resume_from else 0
        self._done = {*resume_from.consumed, *resume_from.unusable} if resume_from else set()
        self._held_back: Job | None = None  # drawn, and not submitted for want of space
        self.disk_full = False

    def look(self) -> SeenOfTrainer:
        """Read what jobs say of the trainer. Between two steps nothing of it changes, so one look is for many jobs."""
        return SeenOfTrainer(self._sampling(), self._trainer_state())

    def issue(self, version: int, oldest_version: int, seen: SeenOfTrainer) -> Job | None:
        """Submit the next job, and return it; None if the checkpoint has that group already."""
        seq = self.next_seq
        row = next(self._prompts)
        self.next_seq += 1
        if seq in self._done:
            return None
        self._held_back = job = Job(
            run_id=self.run_id,
            seq=seq,
            row=row,
            num_generations=self._num_generations,
            seed=sampling_seed(self._seed, seq),
            born_version=version,
            min_version=oldest_version,
            sampling=seen.sampling,
            task=task_of(row),
            trainer_state=seen.state,
        )
        self.submit_held_back()
        return job

    def submit_held_back(self) -> bool:
        """Submit the job that found no space on the disk, if there is one; False when there is still none."""
        if self._held_back is None:
            return True
        try:
            self._queue.submit(self._held_back)
        except DiskFullError as error:
            if not self.disk_full:
                logger.warning("{} No more jobs are issued until there is room.", error)
                self._archive.make_space()
            self.disk_full = True
            return False
        self._held_back, self.disk_full = None, False
        return True

    def make_space_for_groups(self) -> None:
        """Trim the archive where workers find no space for their groups: they can only wait for that."""
        if self._queue.short_of_room():
            self._archive.make_space()


def task_of(row: Mapping[str, Any]) -> str:
    """The task of a row by its column `task`; empty without one, or where it holds something else than a name."""
    task = row.get("task")
    return task if isinstance(task, str) else ""


def plain_fields(state: Any) -> dict[str, Any]:
    """The numbers and texts of a `TrainerState`, without the history of its logs: reward functions see them."""
    plain = {name: it.item() if isinstance(it, np.generic) else it for name, it in vars(state).items()}
    return {name: value for name, value in plain.items() if type(value) in (bool, int, float, str)}


def sampling_seed(run_seed: int, seq: int) -> int:
    """The seed that samples group `seq`: the same in every run of the same seed, whichever worker generates it."""
    return seed_from(f"{run_seed}:{seq}")
