"""Groups with tools, environments or code of the user's between their tokens, each in a thread of its own.

TRL's tool loop and environments ask for tokens in the middle of a function and go on when they have them. So each group
runs that code in a thread, on a copy of the trainer, and its generator posts a `Turn` to the thread that steps the
engine. Only one group's code runs at a time (`_baton`): the tokenizer, tools and environments of the user need not be
safe for threads. A group that waits for tokens lets the others go on. Code that hangs holds up all groups, so the
worker makes no progress and `--worker-timeout` ends it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.rollout.in_flight import Afterwards, Events, GroupInFlight, Turn
from async_grpo.rollout.threads import KeptThreads

if TYPE_CHECKING:
    from async_grpo.queue import Claim

TURN_WAIT_S = 4 * 3600.0  # for the completions of one turn; the engine's thread is watched meanwhile
LOOK_S = 5.0  # a waiting group looks this often whether the engine's thread is alive


class TurnGenerator:
    """The `Generator` of one group: what TRL asks for becomes a turn for the engine's thread."""

    def __init__(self, threads: GroupThreads, group: GroupInFlight) -> None:
        self._threads = threads
        self._group = group
        self.on_step: Callable[[], None] = lambda: None

    def generate(self, prompt_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        return self._threads.have_sampled(self._group, prompt_ids).sampled()


class GroupThreads:
    """Starts groups and passes on what they want. Made and used by the thread that steps the engine.

    Args:
        trainer: the rollout trainer; each group gets a copy from its `fork`.
        afterwards: called in the group's thread with what was generated, before the copy serves another group.
    """

    def __init__(self, trainer: Any, afterwards: Afterwards) -> None:
        self._trainer = trainer
        self._afterwards = afterwards
        self._threads = KeptThreads()
        self._idle: list[Any] = []  # copies of the trainer that no group uses: their environments are kept
        self._baton = threading.Lock()
        self.code_since = 0.0  # when a group's own code last began to run, or was let go on (monotonic seconds)
        self._engine_thread = threading.current_thread()
        self._events = Events()

    def start(self, claims: Sequence[Claim], version: int) -> list[GroupInFlight]:
        return [self._start(claim, version) for claim in claims]

    def _start(self, claim: Claim, version: int) -> GroupInFlight:
        group = GroupInFlight(claim, version)
        self.code_since = time.monotonic()
        trainer = self._idle.pop() if self._idle else self._trainer.fork()
        trainer.generator = TurnGenerator(self, group)
        trainer.state.global_step = version  # what a reward function sees as `trainer_state`
        self._threads.run(partial(self._run, trainer, group), name=f"group {claim.job.seq}")
        return group

    def events(self, timeout_s: float) -> list[Turn | GroupInFlight]:
        return self._events.take(timeout_s)

    def wake(self) -> None:
        self._events.wake()

    def have_sampled(self, group: GroupInFlight, prompt_ids: Sequence[list[int]]) -> Turn:
        """Called by a group's thread: let the other groups go on until the tokens are there."""
        done = threading.Event()

        def let_go_on() -> None:
            self.code_since = time.monotonic()
            done.set()

        turn = Turn(group, len(group.turns), prompt_ids, let_go_on)
        group.turns.append(turn)
        self._baton.release()
        try:
            self._events.put(turn)
            self._wait_for(done)
        finally:
            self._baton.acquire()
            self.code_since = time.monotonic()
        return turn

    def _wait_for(self, done: threading.Event) -> None:
        waited = 0.0
        while not done.wait(LOOK_S):
            waited += LOOK_S
            if not self._engine_thread.is_alive():
                raise PeerDiedError("The engine's thread has ended.")
            if waited > TURN_WAIT_S:
                raise WaitTimeoutError(f"Waited {waited:.0f} s for the engine's tokens, in vain.")

    def _run(self, trainer: Any, group: GroupInFlight) -> None:
        with self._baton:
            self.code_since = time.monotonic()
            try:
                job = group.claim.job
                (group.group,) = trainer.generate_groups([job.row], job.num_generations)
                group.result = self._afterwards(trainer, group)
            except BaseException as error:  # noqa: BLE001  # the user's tools run inside: whatever they raise belongs to the job
                group.error, group.traceback = error, traceback.format_exc()
        group.seconds = time.monotonic() - group.started
        self._idle.append(trainer)
        self._events.put(group)
