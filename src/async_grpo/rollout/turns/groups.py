"""Generates the groups whose completions have turns, or that code of the user's makes: a worker's `Generation`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from async_grpo.engines import Engine, Fields, PreparedGroup, SampledGroup
from async_grpo.errors import PeerDiedError, WaitTimeoutError
from async_grpo.rollout.generation import Generation
from async_grpo.rollout.threads import KeptThreads, refusing_signals
from async_grpo.rollout.trl_group import GroupOutcome
from async_grpo.rollout.turns.asks import Asks, as_exception
from async_grpo.rollout.turns.dialogue import Dialogue, Dialogues
from async_grpo.rollout.turns.tools import Tools
from async_grpo.settings import WorkerSettings
from async_grpo.setup.openai_harness import OpenAIHarness
from async_grpo.telemetry.activity import activity
from async_grpo.tokens import ids_and_logprobs

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.endpoint.harness import Harness
    from async_grpo.rollout.trl_group import GeneratedGroup
    from async_grpo.rollout.trl_trainer import Images, RolloutTrainer, Sampled

WAKE_S = 0.02  # a worker whose engine is idle waits this long for its dialogues before it looks around
ROUNDS = 6  # of the event loop between two steps of the engine: what woke up gets to its next wait
CLOSE_S = 2.0  # that code which waits for tokens gets to end
T = TypeVar("T")
TURN_WAIT_S = 4 * 3600.0  # for the completions of one turn; the worker's thread is watched meanwhile
LOOK_S = 5.0  # waiting code looks this often whether the worker's thread is alive


class Turns(Generation):
    """Steps an event loop between two steps of the engine."""

    def __init__(self, trl: RolloutTrainer, engine: Engine, settings: WorkerSettings | None = None) -> None:
        settings = settings or WorkerSettings()
        super().__init__(trl, engine)
        self._loop = asyncio.new_event_loop()
        self._asks = Asks(engine)
        self._threads = Threads()
        self._whole = WholeGenerations(self._asks, self._threads, threading.current_thread())
        self._tools = Tools(trl.tools, timeout_s=settings.tool_timeout, users_loop=lambda: trl.trainer.async_loop)
        self._harness = self._harness_of(engine, settings)
        self._by_transcript = trl.goes_by_turns or self._harness is not None
        self._beginning = asyncio.Lock()  # environments are reset group by group
        self._copies = _Copies(trl, self._tools)
        self._open: dict[asyncio.Task[list[GroupOutcome]], tuple[Sequence[Job], int]] = {}  # jobs, and their version

    @property
    def most_groups(self) -> int:
        """No more than the capacity of the engine, less those whose environments are not free for another group yet."""
        unscored = self._copies.unscored
        return self._engine.most_groups - unscored if self.joins or not unscored else 0

    def start(self, jobs: Sequence[Job], version: int) -> None:
        """All jobs together where a function of the user's generates, and the engine samples nothing else."""
        if self.joins or self._by_transcript:
            parts = [[job] for job in jobs]
        else:
            parts = [[*part] for _, part in groupby(jobs, lambda job: (job.sampling, job.trainer_state))]
        for part in parts:
            self._open_task(part, version)

    def step(self) -> list[GroupOutcome]:
        if self._open:
            self._loop.run_until_complete(self._go_on())
        if self._tools.in_time or (self._harness and self._harness.in_time):
            activity.progress()  # their time may be longer than the worker's
        self._tools.check()
        if self._harness is not None:
            self._harness.check()
        if self._asks.step():
            self._loop.run_until_complete(_rounds())
        return self._ended()

    def close(self) -> None:
        """Drop what is open. It can be used again."""
        self._engine.close()
        self._asks.refuse(PeerDiedError("Nobody waits for this group any more."))
        dropped, self._open = [*self._open], {}
        for task in dropped if self._by_transcript else ():
            task.cancel()
        if dropped:
            self._loop.run_until_complete(asyncio.wait(dropped, timeout=CLOSE_S))

    def _harness_of(self, engine: Engine, settings: WorkerSettings) -> Harness | None:
        """Where the setup file has an agent that asks an endpoint."""
        given = self._trl.trainer.rollout_func
        if not isinstance(given, OpenAIHarness) or self._trl.generates_itself:
            return None
        from async_grpo.rollout.endpoint.harness import Harness

        return Harness(given, self._trl, engine, self._asks, self._loop, settings.tool_timeout)

    # Groups, on the event loop

    def _open_task(self, jobs: Sequence[Job], version: int) -> None:
        self._open[self._loop.create_task(self._outcomes(jobs, version))] = jobs, version

    async def _outcomes(self, jobs: Sequence[Job], version: int) -> list[GroupOutcome]:
        try:
            made = await self._made(jobs, version)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # noqa: BLE001  # of a prompt, a template, the user's code: it belongs to the job
            error = as_exception(raised)
            return [GroupOutcome(job=job, error=error) for job in jobs]
        finally:
            self._asks.happened.set()
        return [GroupOutcome(job=job, group=group) for job, group in zip(jobs, made, strict=True)]

    async def _made(self, jobs: Sequence[Job], version: int) -> list[GeneratedGroup]:
        if self._harness is not None:
            return [await self._harness.play(jobs[0], version)]
        if self._trl.goes_by_turns:
            return await self._copies.used(lambda copy: self._conversed(jobs[0], version, copy))
        if not self.joins:
            torch.manual_seed(jobs[0].seed)  # a rollout_func may sample with the worker's own model
        return await self._copies.used(lambda copy: self._by_function(jobs, version, copy))

    async def _by_function(self, jobs: Sequence[Job], version: int, copy: _CompletionCopy) -> list[GeneratedGroup]:
        with self._asks.working():
            return await self._whole.run(copy.trl, jobs, version)

    async def _conversed(self, job: Job, version: int, copy: _CompletionCopy) -> list[GeneratedGroup]:
        with copy.trl.view.during(job, version):
            dialogues = Dialogues(copy.trl, job, version)
            with self._asks.working():
                await self._begin(dialogues)
            await self._asks.side_by_side([self._converse(each, copy) for each in dialogues.all])
            return [dialogues.finish()]

    async def _begin(self, dialogues: Dialogues) -> None:
        if not self._copies.have_environments:
            dialogues.begin()
            return
        async with self._beginning:
            await self._threads.run(dialogues.begin, name=f"group {dialogues.job.seq}")

    async def _converse(self, dialogue: Dialogue, copy: _CompletionCopy) -> None:
        with self._asks.working():
            dialogue.begin(await self._asks.continued(dialogue.prompt))
            while dialogue.wants_tools:
                outcomes = await self._tools.run(dialogue.calls(), copy.calls_left)
                prompt = dialogue.prompt_after(outcomes)
                if prompt is None:
                    return
                dialogue.add(outcomes, await self._asks.continued(prompt))

    async def _go_on(self) -> None:
        """Let all go on that can, until the engine has something to do."""
        happened = self._asks.happened
        if not (self._asks.are_sampled or happened.is_set()):
            with suppress(TimeoutError):
                await asyncio.wait_for(happened.wait(), WAKE_S)
        await _rounds()
        happened.clear()

    def _ended(self) -> list[GroupOutcome]:
        ended: list[GroupOutcome] = []
        for task in [task for task in self._open if task.done()]:
            (jobs, version), outcomes = self._open.pop(task), task.result()
            if len(outcomes) > 1 and outcomes[0].error is not None:  # the error belongs to one of them
                for job in jobs:
                    self._open_task([job], version)
            else:
                ended += outcomes
        return ended


@dataclass(slots=True)
class _CompletionCopy:
    """A copy of the worker's trainer that generates some groups, with environments of its own."""

    trl: RolloutTrainer
    unscored: int = 0  # groups that use its environments
    calls_left: set[int] = field(default_factory=set)  # of tools, that were given up


class _Copies:
    """Copies of the trainer. Environments are used again once their groups have been scored."""

    def __init__(self, trl: RolloutTrainer, tools: Tools) -> None:
        self.have_environments = trl.trainer.environment_factories is not None
        self._trl, self._tools = trl, tools
        self._idle = [] if self.have_environments else [trl]  # the trainer and copies of it that no group uses
        self.unscored = 0  # groups that still have their environments
        self._changing = threading.Lock()  # groups are let go of by the threads that score them

    async def used(
        self, make: Callable[[_CompletionCopy], Coroutine[Any, Any, list[GeneratedGroup]]]
    ) -> list[GeneratedGroup]:
        copy = _CompletionCopy(self._idle.pop() if self._idle else self._trl.fork())
        try:
            made = await make(copy)
        except BaseException:
            self._release(copy)
            raise
        if not self.have_environments:
            self._release(copy)
            return made
        with self._changing:
            copy.unscored = len(made)
            self.unscored += len(made)
        return [replace(group, let_go=partial(self._let_go, copy)) for group in made]

    def _let_go(self, copy: _CompletionCopy) -> None:
        with self._changing:
            self.unscored -= 1
            copy.unscored -= 1
            if copy.unscored == 0:
                self._release(copy)

    def _release(self, copy: _CompletionCopy) -> None:
        """Use it for other groups, unless a tool that was given up may still use its environments."""
        if not (self.have_environments and self._tools.still_running(copy.calls_left)):
            self._idle.append(copy.trl)


async def _rounds() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)


class Threads:
    """Runs functions beside the event loop that awaits them."""

    def __init__(self) -> None:
        self._threads = KeptThreads()

    async def run(self, work: Callable[[], T], name: str) -> T:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[T] = loop.create_future()

        def in_thread() -> None:
            try:
                end = partial(ended.set_result, work())
            except BaseException as raised:  # noqa: BLE001  # of the user's code: it belongs to the job
                end = partial(ended.set_exception, as_exception(raised))
            with suppress(RuntimeError):  # the loop is closed: the worker has ended
                loop.call_soon_threadsafe(lambda: ended.done() or end())

        self._threads.run(in_thread, name)
        return await ended


class WholeGenerations:
    """Runs TRL's generation as one function, on a copy of the trainer for each. `worker_thread` steps the loop.

    The code from prompts to completions is the user's, and asks for tokens in its middle, so it runs in a thread. Only
    one runs at a time: it need not be thread-safe. While it waits for tokens, others run.
    """

    def __init__(self, asks: Asks, threads: Threads, worker_thread: threading.Thread) -> None:
        self._asks = asks
        self._threads = threads
        self._worker_thread = worker_thread
        self._alone = threading.Lock()

    async def run(self, trl: RolloutTrainer, jobs: Sequence[Job], version: int) -> list[GeneratedGroup]:
        """The groups of the jobs, generated together."""
        turns: list[SampledGroup] = []
        loop = asyncio.get_running_loop()

        def sample(prompt_ids: list[list[int]], images: Images = None, fields: Fields | None = None) -> Sampled:
            job = replace(jobs[0], sampling=trl.sampling_of(jobs[0]))
            group = PreparedGroup(
                job=job,
                version=version,
                prompt_ids=[list(ids) for ids in prompt_ids],
                images=images,
                fields=(fields,) if fields else (),
                turn=len(turns),
            )
            self._alone.release()
            try:
                turns.append(self._wait(asyncio.run_coroutine_threadsafe(self._asks.sampled(group), loop)))
            finally:
                self._alone.acquire()
            return ids_and_logprobs(turns[-1].tokens)

        def work() -> list[GeneratedGroup]:
            with self._alone, refusing_signals():
                return trl.generate(jobs, version, sample)

        return [noted(group, turns) for group in await self._threads.run(work, name=f"group {jobs[0].seq}")]

    def _wait(self, sampled: Future[SampledGroup]) -> SampledGroup:
        deadline = time.monotonic() + TURN_WAIT_S
        while not wait([sampled], LOOK_S).done:
            if not self._worker_thread.is_alive():
                raise PeerDiedError("The worker's thread has ended.")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"Timed out after {TURN_WAIT_S:.0f} s waiting for the engine's tokens.")
        return sampled.result()


def noted(group: GeneratedGroup, turns: Sequence[SampledGroup]) -> GeneratedGroup:
    """The group with what the engine noted of the tokens that it sampled.

    A later turn's prompt is the group's prompt and the completion so far, and its rows are in the completions' order.
    """
    all_sampled = [sampled for turn in turns for sampled in turn.tokens]
    names_versions = any(sampled.names_versions for sampled in all_sampled)
    if not (names_versions or any(sampled.names_kept for sampled in all_sampled)):
        return group
    tokens = [*group.tokens]
    for turn in turns:
        row = 0
        for prompt, sampled in zip(turn.prepared.prompt_ids, turn.tokens, strict=True):
            while not _continues(group, row, prompt, sampled.ids):
                row += 1
            tokens[row] = tokens[row].noted(len(prompt) - len(group.prompt_ids[row]), sampled)
            row += 1
    noted = replace(group, tokens=tokens)
    if names_versions:
        noted = replace(group, tokens=[each.of_version(noted.version) for each in tokens])
    return noted


def _continues(group: GeneratedGroup, row: int, prompt: list[int], ids: list[int]) -> bool:
    """Whether `prompt` and then `ids`, which TRL may have cut, is how the row's prompt and completion begin."""
    whole = group.prompt_ids[row] + group.tokens[row].ids
    return whole[: len(prompt)] == prompt and ids[: len(whole) - len(prompt)] == whole[len(prompt) :][: len(ids)]
