"""Generates the groups whose completions have turns, or that code of the user's makes: a worker's `Generation`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from async_grpo.engines import Engine
from async_grpo.errors import PeerDiedError
from async_grpo.rollout.generation import Generation
from async_grpo.rollout.trl_group import GroupOutcome
from async_grpo.rollout.turns.asks import Asks, as_exception
from async_grpo.rollout.turns.dialogue import Dialogue, Dialogues
from async_grpo.rollout.turns.tools import Tools
from async_grpo.rollout.turns.whole import Threads, WholeGenerations
from async_grpo.settings import WorkerSettings
from async_grpo.setup.openai_harness import OpenAIHarness
from async_grpo.telemetry.activity import activity

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.endpoint.harness import Harness
    from async_grpo.rollout.trl_group import GeneratedGroup
    from async_grpo.rollout.trl_trainer import RolloutTrainer

WAKE_S = 0.02  # a worker whose engine is idle waits this long for its dialogues before it looks around
ROUNDS = 6  # of the event loop between two steps of the engine: what woke up gets to its next wait
CLOSE_S = 2.0  # that code which waits for tokens gets to end


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
        self._open: dict[asyncio.Task[list[GroupOutcome]], _UnderWay] = {}

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
            self._open_task(_UnderWay(part, version))

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

    def _open_task(self, started: _UnderWay) -> None:
        self._open[self._loop.create_task(self._outcomes(started))] = started

    async def _outcomes(self, started: _UnderWay) -> list[GroupOutcome]:
        jobs = started.jobs
        try:
            made = await self._made(started)
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # noqa: BLE001  # of a prompt, a template, the user's code: it belongs to the job
            error = as_exception(raised)
            return [GroupOutcome(job=job, error=error) for job in jobs]
        finally:
            self._asks.happened.set()
        return [GroupOutcome(job=job, group=group) for job, group in zip(jobs, made, strict=True)]

    async def _made(self, started: _UnderWay) -> list[GeneratedGroup]:
        if self._harness is not None:
            return [await self._harness.play(started.jobs[0], started.version)]
        if self._trl.goes_by_turns:
            return await self._copies.used(lambda copy: self._conversed(started.jobs[0], started.version, copy))
        if not self.joins:
            torch.manual_seed(started.jobs[0].seed)  # a rollout_func may sample with the worker's own model
        return await self._copies.used(lambda copy: self._by_function(started, copy))

    async def _by_function(self, started: _UnderWay, copy: _CompletionCopy) -> list[GeneratedGroup]:
        with self._asks.working():
            return await self._whole.run(copy.trl, started.jobs, started.version)

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
            started, outcomes = self._open.pop(task), task.result()
            if len(outcomes) > 1 and outcomes[0].error is not None:  # the error belongs to one of them
                for job in started.jobs:
                    self._open_task(_UnderWay([job], started.version))
            else:
                ended += outcomes
        return ended


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """Jobs that are generated together, or one."""

    jobs: Sequence[Job]
    version: int


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
        """The groups that `make` makes with a copy."""
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
