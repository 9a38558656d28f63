"""Groups whose completions are sampled whole: TRL's code runs before and after, in the thread that steps the engine.

Without tools, environments or code of the user's in between, nothing has to wait in the middle of a function: TRL
prepares the prompts, and when all tokens are there it is called again for the rest. Groups that start or end together
go through TRL together. That spares a thread for each, and dozens of threads that wake at once.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.rollout.in_flight import Afterwards, Events, GroupInFlight, Turn

if TYPE_CHECKING:
    from async_grpo.queue import Claim
    from async_grpo.rollout.trl_trainer import PreparedGroup


class WholeGroups:
    """Starts groups and finishes those that have their tokens. For trainers that `samples_whole`.

    Args:
        trainer: the rollout trainer, of which one copy serves all groups.
        afterwards: called with what was generated.
    """

    def __init__(self, trainer: Any, afterwards: Afterwards) -> None:
        self._trainer = trainer.fork()
        self._afterwards = afterwards
        self._prepared: dict[GroupInFlight, PreparedGroup] = {}
        self.code_since = 0.0  # no group's code ever runs beside the engine
        self._events = Events()

    def start(self, claims: Sequence[Claim], version: int) -> list[GroupInFlight]:
        groups = [GroupInFlight(claim, version) for claim in claims]
        _together(self._prepare, groups)
        for group in groups:
            self._events.put(group if group.error else group.turns[0])
        return groups

    def events(self, timeout_s: float) -> list[Turn | GroupInFlight]:
        found = self._events.take(timeout_s)
        ended = [event for event in found if isinstance(event, GroupInFlight) and event.error is None]
        for version in sorted({group.version for group in ended}):
            self._finish([group for group in ended if group.version == version])
        return found

    def wake(self) -> None:
        self._events.wake()

    def _prepare(self, groups: Sequence[GroupInFlight]) -> None:
        jobs = [group.claim.job for group in groups]
        prepared = self._trainer.prepare_groups([job.row for job in jobs], jobs[0].num_generations)
        for group, one in zip(groups, prepared, strict=True):
            self._prepared[group] = one
            group.turns.append(Turn(group, 0, one.prompt_ids, partial(self._events.put, group)))

    def _finish(self, groups: Sequence[GroupInFlight]) -> None:
        """All tokens of these groups are there, or none of one will be."""
        self._trainer.state.global_step = groups[0].version  # what a reward function sees as `trainer_state`
        _together(self._complete, groups)
        for group in groups:
            if group.error is None:
                _together(self._see_to, [group])
            group.seconds = time.monotonic() - group.started
            self._prepared.pop(group, None)

    def _complete(self, groups: Sequence[GroupInFlight]) -> None:
        sampled = [group.turns[0].sampled() for group in groups]
        made = self._trainer.finish_groups([self._prepared[group] for group in groups], sampled)
        for group, one in zip(groups, made, strict=True):
            group.group = one

    def _see_to(self, groups: Sequence[GroupInFlight]) -> None:
        for group in groups:
            group.result = self._afterwards(self._trainer, group)


def _together(work: Callable[[Sequence[GroupInFlight]], None], groups: Sequence[GroupInFlight]) -> None:
    """Do it for all groups at once, which is quicker, or for each alone where that fails: an error costs one group."""
    try:
        work(groups)
    except Exception as error:  # noqa: BLE001  # a row or a template that TRL cannot take, or a reward: it belongs to the job
        if len(groups) == 1:
            groups[0].error, groups[0].traceback = error, traceback.format_exc()
            return
        for group in groups:
            _together(work, [group])
