"""Several prompt groups in the making at once, each in a thread of its own, all on one engine.

TRL's prompt handling, its tool loop and environments ask for tokens in the middle of a function and go on when they
have them. So each group runs that code in a thread, on a copy of the trainer, and its generator posts a `Turn` to the
thread that steps the engine. Only one group's code runs at a time (`_baton`): the tokenizer, tools and environments of
the user need not be safe for threads. A group that waits for tokens lets the others go on. Code that hangs holds up all
groups, so the worker makes no progress and `--worker-timeout` ends it.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.rollout.kept_threads import KeptThreads

if TYPE_CHECKING:
    from async_grpo.job_queue import Claim
    from async_grpo.rollout.trl_hooks import GeneratedGroup

TURN_WAIT_S = 4 * 3600.0  # for the completions of one turn; the engine's thread is watched meanwhile
LOOK_S = 5.0  # a waiting group looks this often whether the engine's thread is alive


class Turn:
    """Prompts of one group that want a completion each. The engine's thread fills it, the group's waits for it."""

    def __init__(self, group: GroupThread, number: int, prompt_ids: Sequence[list[int]]) -> None:
        self.group = group
        self.number = number  # of the group's turns, from 0
        self.prompt_ids = [list(ids) for ids in prompt_ids]
        self.token_ids: list[list[int]] = [[] for _ in prompt_ids]
        self.logprobs: list[list[float]] = [[] for _ in prompt_ids]
        self.versions: list[list[int]] = [[] for _ in prompt_ids]  # of the weights that sampled each token
        self._open = len(self.prompt_ids)
        self._error: BaseException | None = None
        self._done = threading.Event()

    def add(self, place: int, token_ids: list[int], logprobs: list[float], version: int, *, finished: bool) -> None:
        self.token_ids[place] += token_ids
        self.logprobs[place] += logprobs
        self.versions[place] += [version] * len(token_ids)
        self._open -= finished
        if self.complete:
            self.group.threads.code_since = time.monotonic()
            self._done.set()

    @property
    def complete(self) -> bool:
        """Whether every completion is there."""
        return self._open == 0

    def fail(self, error: BaseException) -> None:
        """Raise `error` in the group's thread."""
        self._error = error
        self._done.set()

    def wait(self, engine_thread: threading.Thread) -> None:
        waited = 0.0
        while not self._done.wait(LOOK_S):
            waited += LOOK_S
            if not engine_thread.is_alive():
                raise PeerDiedError("The engine's thread has ended.")
            if waited > TURN_WAIT_S:
                raise WaitTimeoutError(f"Waited {waited:.0f} s for the engine's tokens, in vain.")
        if self._error is not None:
            raise self._error


class GroupThread:
    """One claimed job on its way through TRL. `group` or `error` is set when it comes out of `GroupThreads.events`."""

    def __init__(self, threads: GroupThreads, claim: Claim, version: int) -> None:
        self.threads = threads
        self.claim = claim
        self.version = version  # the weights' when it started
        self.turns: list[Turn] = []
        self.group: GeneratedGroup | None = None
        self.token_versions: list[list[int]] | None = None  # set by `afterwards` where weights change meanwhile
        self.result: Any = None  # of `afterwards`
        self.error: BaseException | None = None
        self.traceback = ""
        self.started = time.monotonic()
        self.seconds = 0.0  # from its start to its end
        self.busy_s = 0.0  # its share of the engine's time
        self.adopt_s = 0.0  # its share of the time for adopting weights

    def oldest_version(self) -> int:
        """The oldest weights that sampled any of its tokens."""
        sampled = [version for turn in self.turns for versions in turn.versions for version in versions]
        return min(sampled, default=self.version)


class TurnGenerator:
    """The `Generator` of one group: what TRL asks for becomes a turn for the engine's thread."""

    def __init__(self, group: GroupThread) -> None:
        self._group = group
        self.on_step: Callable[[], None] = lambda: None

    def generate(self, prompt_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        turn = Turn(self._group, len(self._group.turns), prompt_ids)
        self._group.turns.append(turn)
        self._group.threads.wait_for(turn)
        return [list(ids) for ids in turn.token_ids], [list(values) for values in turn.logprobs]


class GroupThreads:
    """Starts groups and passes on what they want. Made and used by the thread that steps the engine.

    Args:
        trainer: the rollout trainer; each group gets a copy from its `fork`.
        afterwards: called in the group's thread with what was generated, before the copy serves another group.
    """

    def __init__(self, trainer: Any, afterwards: Callable[[Any, GroupThread], Any]) -> None:
        self._trainer = trainer
        self._afterwards = afterwards
        self._threads = KeptThreads()
        self._idle: list[Any] = []  # copies of the trainer that no group uses: their environments are kept
        self._baton = threading.Lock()
        self.code_since = 0.0  # when a group's own code last began to run, or was let go on (monotonic seconds)
        self._engine_thread = threading.current_thread()
        self._events: SimpleQueue[Turn | GroupThread | None] = SimpleQueue()  # None: only wake up

    def start(self, claim: Claim, version: int) -> GroupThread:
        group = GroupThread(self, claim, version)
        self.code_since = time.monotonic()
        trainer = self._idle.pop() if self._idle else self._trainer.fork()
        trainer.generator = TurnGenerator(group)
        trainer.state.global_step = version  # what a reward function sees as `trainer_state`
        self._threads.run(partial(self._run, trainer, group), name=f"group {claim.job.seq}")
        return group

    def events(self, timeout_s: float) -> list[Turn | GroupThread]:
        """Turns that were begun and groups that have ended; waits up to `timeout_s` for the first, or for `wake`."""
        found: list[Turn | GroupThread] = []
        try:
            while True:
                event = self._events.get(timeout=timeout_s)
                timeout_s = 0
                if event is not None:
                    found.append(event)
        except Empty:
            return found

    def wake(self) -> None:
        """End a wait for events: there is something else to do. From any thread."""
        self._events.put(None)

    def wait_for(self, turn: Turn) -> None:
        """Called by a group's thread: let the other groups go on until the tokens are there."""
        self._baton.release()
        try:
            self._events.put(turn)
            turn.wait(self._engine_thread)
        finally:
            self._baton.acquire()
            self.code_since = time.monotonic()

    def _run(self, trainer: Any, group: GroupThread) -> None:
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


def versions_of_tokens(group: GeneratedGroup, turns: Sequence[Turn], default: int) -> list[list[int]]:
    """The policy version of each token of each completion; `default` for what a tool wrote.

    A later turn's prompt is the group's prompt and the completion so far, and its rows are in the completions' order.
    """
    versions = [[default] * len(ids) for ids in group.completion_ids]
    for turn in turns:
        row = 0
        for prompt, ids, sampled in zip(turn.prompt_ids, turn.token_ids, turn.versions, strict=True):
            while not _continues(group, row, prompt, ids):
                row += 1
            start = len(prompt) - len(group.prompt_ids[row])
            kept = versions[row][start : start + len(sampled)]
            versions[row][start : start + len(kept)] = sampled[: len(kept)]
            row += 1
    return versions


def _continues(group: GeneratedGroup, row: int, prompt: list[int], ids: list[int]) -> bool:
    """Whether `prompt` and then `ids`, which TRL may have cut, is how the row's prompt and completion begin."""
    whole = group.prompt_ids[row] + group.completion_ids[row]
    return whole[: len(prompt)] == prompt and ids[: len(whole) - len(prompt)] == whole[len(prompt) :][: len(ids)]
