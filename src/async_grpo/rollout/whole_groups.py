"""Groups whose completions are sampled whole: TRL's code runs before and after, in the thread that steps the engine.

Without tools, environments or code of the user's in between, nothing has to wait in the middle of a function: TRL
prepares the prompts, and when all tokens are there it is called again for the rest. That is a tenth of a millisecond
each; a thread for each group takes ten times that once dozens of them wake together.
"""

from __future__ import annotations

import time
import traceback
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from async_grpo.rollout.in_flight import Afterwards, GroupInFlight, Turn

if TYPE_CHECKING:
    from async_grpo.job_queue import Claim
    from async_grpo.rollout.trl_hooks import PreparedGroups


class WholeGroups:
    """Starts groups and finishes those that have their tokens. For trainers that `samples_whole`.

    Args:
        trainer: the rollout trainer, of which one copy serves all groups.
        afterwards: called with what was generated.
    """

    def __init__(self, trainer: Any, afterwards: Afterwards) -> None:
        self._trainer = trainer.fork()
        self._afterwards = afterwards
        self._prepared: dict[GroupInFlight, PreparedGroups] = {}
        self.code_since = 0.0  # no group's code ever runs beside the engine
        self._events: SimpleQueue[Turn | GroupInFlight | None] = SimpleQueue()  # None: only wake up

    def start(self, claim: Claim, version: int) -> GroupInFlight:
        group = GroupInFlight(claim, version)
        try:
            prepared = self._trainer.prepare_groups([claim.job.row], claim.job.num_generations)
        except Exception as error:  # noqa: BLE001  # a row or a template that TRL cannot take belongs to the job
            group.error, group.traceback = error, traceback.format_exc()
            self._events.put(group)
            return group
        self._prepared[group] = prepared
        turn = Turn(group, 0, prepared.prompt_ids, partial(self._events.put, group))
        group.turns.append(turn)
        self._events.put(turn)
        return group

    def events(self, timeout_s: float) -> list[Turn | GroupInFlight]:
        found: list[Turn | GroupInFlight] = []
        try:
            while True:
                event = self._events.get(timeout=timeout_s)
                timeout_s = 0
                if isinstance(event, GroupInFlight):
                    self._finish(event)
                if event is not None:
                    found.append(event)
        except Empty:
            return found

    def wake(self) -> None:
        self._events.put(None)

    def _finish(self, group: GroupInFlight) -> None:
        """All its tokens are there, or none will be."""
        if (prepared := self._prepared.pop(group, None)) is None:
            return  # it never got so far
        trainer, (turn,) = self._trainer, group.turns
        trainer.state.global_step = group.version  # what a reward function sees as `trainer_state`
        try:
            (group.group,) = trainer.finish_groups(prepared, turn.sampled())
            group.result = self._afterwards(trainer, group)
        except Exception as error:  # noqa: BLE001  # as above; the user's rewards may run inside, too
            group.error, group.traceback = error, traceback.format_exc()
        group.seconds = time.monotonic() - group.started
