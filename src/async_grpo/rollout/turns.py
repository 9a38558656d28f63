"""Groups with tools, environments or code of the user's between their tokens, behind the same four calls.

TRL's tool loop and environments ask for tokens in the middle of a function and continue when they have them. So that
code runs in a thread, on a copy of the trainer, and each of its requests is a turn: prompts that the worker's thread
has sampled. Only one thread runs such code at a time (`_baton`): the tokenizer, tools and environments of the user need
not be thread-safe. Code that waits for tokens lets the others run. Code that hangs holds up all groups, so the worker
makes no progress and `--worker-timeout` ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch

from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.rollout.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.rollout.main_thread import refusing_signals
from async_grpo.rollout.threads import KeptThreads

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.engines import Fields
    from async_grpo.rollout.policy import Policy
    from async_grpo.rollout.trl_trainer import GeneratedGroup, Images, RolloutTrainer, Sample, Scores, Tokens
    from async_grpo_ipc import RemoteWeights

TURN_WAIT_S = 4 * 3600.0  # for the completions of one turn; the worker's thread is watched meanwhile
LOOK_S = 5.0  # a waiting conversation looks this often whether the worker's thread is alive
QUICK_CODE_S = 0.01  # code that takes longer runs while the engine samples
CODE_WAKE_S = 0.02  # a worker whose engine is idle waits this long for turns
CLOSE_S = 2.0  # that conversations get to end


class Turns:
    """Takes the place of trainer and engine in the worker: `prepare`, `sample`, `finish`, `score`.

    Made and used by the worker's thread; `score` may be called by others.
    """

    def __init__(self, trl: RolloutTrainer, engine: Engine) -> None:
        self.joins = engine.joins
        self._trl = trl
        self._engine = engine
        self._keeps_environments = trl.trainer.environment_factories is not None
        self._threads = KeptThreads()
        self._worker_thread = threading.current_thread()
        self._baton = threading.Lock()
        self._idle = [trl]  # the trainer and copies of it that no conversation uses
        self._open: set[_Conversation] = set()
        self._events: SimpleQueue[_Turn | _Conversation] = SimpleQueue()  # turns asked for, conversations that ended
        self._asked: list[PreparedGroup] = []  # turns that the engine has not got yet
        self._sampling: dict[PreparedGroup, _Turn] = {}  # turns that wait for their tokens
        self._made: dict[PreparedGroup, GeneratedGroup] = {}  # to be finished
        self._unscored: dict[int, _Conversation] = {}  # by id of the group, whose environments are still in use
        self._dropped: set[_Conversation] = set()  # that nobody waits for any more
        self._code_since = 0.0  # when some code last began to run (monotonic seconds)

    @property
    def most_groups(self) -> int:
        """No more than the engine has room for, less those whose environments are not free for another group yet."""
        left = self._engine.most_groups - len(self._unscored)
        return left if self.joins or not self._unscored else 0

    # The four calls

    def prepare(self, jobs: Sequence[Job], version: int) -> list[PreparedGroup]:
        """Nothing to do yet: TRL prepares the prompts in the group's thread."""
        return [PreparedGroup(job=job, version=version, prompt_ids=[]) for job in jobs]

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self._start(new)
        if (self._asked or self._sampling) and not self._code_is_quick():
            asked, self._asked = self._asked, []
            for sampled in self._engine.sample(asked):
                self._sampling.pop(sampled.prepared).give(sampled)
                self._code_since = time.monotonic()
        return self._take_events()

    def finish(self, sampled: Sequence[SampledGroup]) -> list[GeneratedGroup]:
        """Nothing is left to do: TRL has made the groups."""
        return [self._made.pop(group.prepared) for group in sampled]

    def score(self, group: GeneratedGroup) -> Scores:
        if not self._keeps_environments:
            return self._trl.score(group)
        with self._baton:  # environments are used again once their groups have been scored
            try:
                return self._trl.score(group)
            finally:
                self._let_go(self._unscored.pop(id(group)))

    def follow(self, weights: RemoteWeights) -> Policy:
        return self._engine.follow(weights)

    def close(self) -> None:
        self._engine.close()
        self._asked.clear()
        for group in self._made.values() if self._keeps_environments else ():  # nobody will score them
            self._let_go(self._unscored.pop(id(group)))
        self._made.clear()
        self._dropped |= self._open
        deadline = time.monotonic() + CLOSE_S
        while self._open and time.monotonic() < deadline:
            for turn in self._sampling.values():
                turn.refuse()
            self._sampling.clear()
            self._take_events()

    # Conversations, in their threads

    def have_sampled(
        self, talk: _Conversation, prompt_ids: Sequence[list[int]], images: Images = None, fields: Fields | None = None
    ) -> Tokens:
        """Let other code run until the completions of these prompts are there."""
        turn = _Turn(talk, prompt_ids, images, fields)
        self._baton.release()
        try:
            self._events.put(turn)
            return turn.wait_for_tokens(self._worker_thread)
        finally:
            self._baton.acquire()
            self._code_since = time.monotonic()

    def _run(self, talk: _Conversation) -> None:
        with self._baton:
            self._code_since = time.monotonic()
            try:
                with refusing_signals():
                    talk.generate(partial(self.have_sampled, talk))
            except BaseException as error:  # noqa: BLE001  # the user's tools run inside: whatever they raise belongs to the job
                talk.error = error
        self._events.put(talk)

    # Conversations, in the worker's thread

    def _start(self, new: Sequence[PreparedGroup]) -> None:
        """A conversation for each group; for all together where the engine samples nothing else meanwhile."""
        if not new:
            return
        for groups in [[group] for group in new] if self.joins else [list(new)]:
            self._start_conversation(groups)

    def _start_conversation(self, groups: Sequence[PreparedGroup]) -> None:
        if not self.joins:
            torch.manual_seed(groups[0].seed)  # a rollout_func may sample with the worker's own model
        self._code_since = time.monotonic()
        talk = _Conversation(groups, self._idle.pop() if self._idle else self._trl.fork())
        self._open.add(talk)
        self._threads.run(partial(self._run, talk), name=f"group {groups[0].job.seq}")

    def _code_is_quick(self) -> bool:
        """Whether some code runs and has only just begun. Then the engine leaves Python to it: short code is done
        sooner than the two would take by turns, and groups that start together are sampled together."""
        return len(self._open) > len(self._sampling) and time.monotonic() - self._code_since < QUICK_CODE_S

    def _take_events(self) -> list[SampledGroup]:
        """Note the turns that were asked for; returns the groups of conversations that have ended."""
        ended: list[SampledGroup] = []
        timeout_s = self._patience()
        try:
            while True:
                event = self._events.get(timeout=timeout_s)
                timeout_s = 0.0
                if isinstance(event, _Conversation):
                    ended += self._ended(event)
                elif event.talk in self._dropped:
                    event.refuse()
                else:
                    self._asked.append(event.prepared)
                    self._sampling[event.prepared] = event
        except Empty:
            return ended

    def _patience(self) -> float:
        if self._code_is_quick():
            return QUICK_CODE_S
        return CODE_WAKE_S if self._open and not self._sampling else 0.0

    def _ended(self, talk: _Conversation) -> list[SampledGroup]:
        self._open.remove(talk)
        if talk in self._dropped:
            self._dropped.remove(talk)
            self._idle.append(talk.trl)
            return []
        if talk.error is not None:
            self._idle.append(talk.trl)
            if len(talk.groups) == 1:
                return [SampledGroup(prepared=group, error=talk.error) for group in talk.groups]
            for group in talk.groups:  # the error belongs to one of them
                self._start_conversation([group])
            return []
        self._made.update(zip(talk.groups, talk.made, strict=True))
        if self._keeps_environments:
            talk.unscored = len(talk.made)
            self._unscored.update((id(group), talk) for group in talk.made)
        else:
            self._idle.append(talk.trl)
        return [SampledGroup(prepared=group) for group in talk.groups]

    def _let_go(self, talk: _Conversation) -> None:
        talk.unscored -= 1
        if talk.unscored == 0:
            self._idle.append(talk.trl)


class _Conversation:
    """Groups on their way through TRL's generation. In the end they are `made`, or there is an `error`."""

    def __init__(self, groups: Sequence[PreparedGroup], trl: RolloutTrainer) -> None:
        self.groups = groups
        self.trl = trl
        self.turns: list[SampledGroup] = []
        self.made: list[GeneratedGroup] = []
        self.error: BaseException | None = None
        self.unscored = 0

    def generate(self, sample: Sample) -> None:
        made = self.trl.generate([group.job for group in self.groups], self.groups[0].version, sample)
        if any(turn.versions is not None for turn in self.turns):
            made = [_with_versions(group, self.turns) for group in made]
        self.made = made


class _Turn:
    """Prompts of a conversation that want a completion each."""

    def __init__(
        self, talk: _Conversation, prompt_ids: Sequence[list[int]], images: Images, fields: Fields | None
    ) -> None:
        first = talk.groups[0]
        self.prepared = PreparedGroup(
            job=first.job,
            version=first.version,
            prompt_ids=[list(ids) for ids in prompt_ids],
            images=images,
            fields=(fields,) if fields else (),
            turn=len(talk.turns),
        )
        self.talk = talk
        self._sampled: Future[SampledGroup] = Future()

    def give(self, sampled: SampledGroup) -> None:
        self._sampled.set_result(sampled)

    def refuse(self) -> None:
        self.give(SampledGroup(prepared=self.prepared, error=PeerDiedError("Nobody waits for this group any more.")))

    def wait_for_tokens(self, worker_thread: threading.Thread) -> Tokens:
        deadline = time.monotonic() + TURN_WAIT_S
        while not wait([self._sampled], LOOK_S).done:
            if not worker_thread.is_alive():
                raise PeerDiedError("The worker's thread has ended.")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Timed out after {TURN_WAIT_S:.0f} s waiting for the engine's tokens.")
        sampled = self._sampled.result()
        if sampled.error is not None:
            raise sampled.error
        self.talk.turns.append(sampled)
        return [list(ids) for ids in sampled.token_ids], [list(values) for values in sampled.logprobs]


def _with_versions(group: GeneratedGroup, turns: Sequence[SampledGroup]) -> GeneratedGroup:
    oldest = min((version for turn in turns for row in turn.versions or () for version in row), default=group.version)
    return replace(group, version=oldest, token_versions=versions_of_tokens(group, turns, oldest))


def versions_of_tokens(group: GeneratedGroup, turns: Sequence[SampledGroup], default: int) -> list[list[int]]:
    """The policy version of each token of each completion; `default` for what a tool wrote.

    A later turn's prompt is the group's prompt and the completion so far, and its rows are in the completions' order.
    """
    versions = [[default] * len(ids) for ids in group.completion_ids]
    for turn in turns:
        row = 0
        for prompt, ids, sampled in zip(turn.prepared.prompt_ids, turn.token_ids, turn.versions or (), strict=True):
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
