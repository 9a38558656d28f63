"""Takes the place of trainer and engine in the worker: `prepare`, `sample`, `finish`, `score`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from async_grpo.errors import PeerDiedError
from async_grpo.rollout.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.rollout.trl_group import refuse_unknown_sampling
from async_grpo.rollout.turns.asks import Ask, Asks, as_exception
from async_grpo.rollout.turns.dialogue import Dialogue, Dialogues, Prompt
from async_grpo.rollout.turns.tools import Tools
from async_grpo.rollout.turns.whole import Threads, WholeGenerations
from async_grpo.settings import WorkerSettings
from async_grpo.setup.openai_harness import OpenAIHarness
from async_grpo.telemetry.activity import activity

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.endpoint.harness import Harness
    from async_grpo.rollout.policy import Policy
    from async_grpo.rollout.trl_group import GeneratedGroup, Scores
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo_ipc import RemoteWeights

WAKE_S = 0.02  # a worker whose engine is idle waits this long for its dialogues before it looks around
ROUNDS = 6  # of the event loop between two steps of the engine: what woke up gets to its next wait
CLOSE_S = 2.0  # that code which waits for tokens gets to end


class Turns:
    """Made and used by the worker's thread, which steps the event loop; `score` may be called by others."""

    def __init__(self, trl: RolloutTrainer, engine: Engine, settings: WorkerSettings | None = None) -> None:
        settings = settings or WorkerSettings()
        self.joins = engine.joins
        self._trl = trl
        self._engine = engine
        self._keeps_environments = trl.trainer.environment_factories is not None
        self._loop = asyncio.new_event_loop()
        self._asks = Asks(engine)
        self._threads = Threads()
        self._whole = WholeGenerations(self._asks, self._threads, threading.current_thread())
        self._tools = Tools(
            trl.tools,
            timeout_s=settings.tool_timeout,
            users_loop=lambda: trl.trainer.async_loop,
        )
        self._harness = self._harness_of(engine, settings)
        self._by_completion = trl.goes_by_turns or self._harness is not None
        self._beginning = asyncio.Lock()  # environments are reset group by group
        self._scoring = threading.Lock()
        self._idle = [] if self._keeps_environments else [trl]  # the trainer and copies of it that no group uses
        self._open: dict[asyncio.Task[list[SampledGroup]], Sequence[PreparedGroup]] = {}
        self._made: dict[PreparedGroup, GeneratedGroup] = {}  # to be finished
        self._unscored: dict[int, _Copy] = {}  # by id of the group, whose environments are still in use

    @property
    def most_groups(self) -> int:
        """No more than the engine has room for, less those whose environments are not free for another group yet."""
        left = self._engine.most_groups - len(self._unscored)
        return left if self.joins or not self._unscored else 0

    # The four calls

    def prepare(self, job: Job, version: int) -> PreparedGroup:
        """No prompts yet: TRL makes them when the group begins."""
        refuse_unknown_sampling(job)
        return PreparedGroup(job=job, version=version, prompt_ids=[])

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self._start(new)
        if self._open:
            self._loop.run_until_complete(self._go_on())
        if self._tools.in_time or (
            self._harness and self._harness.in_time
        ):  # their time may be longer than the worker's
            activity.progress()
        self._tools.check()
        if self._harness is not None:
            self._harness.check()
        if self._asks.step():
            self._loop.run_until_complete(_rounds())
        return self._ended()

    def finish(self, sampled: SampledGroup) -> GeneratedGroup:
        """Nothing is left to do: TRL has made the group."""
        return self._made.pop(sampled.prepared)

    def score(self, groups: Sequence[GeneratedGroup]) -> list[Scores]:
        return self._trl.score(groups)

    def let_go(self, group: GeneratedGroup) -> None:
        """Environments are used again once their groups have been scored."""
        if self._keeps_environments:
            with self._scoring:
                self._unscored_less(self._unscored.pop(id(group)))

    def follow(self, weights: RemoteWeights) -> Policy:
        return self._engine.follow(weights)

    def close(self) -> None:
        """Drop what is open. It can be used again."""
        self._engine.close()
        for group in self._made.values() if self._keeps_environments else ():  # nobody will score them
            self._unscored_less(self._unscored.pop(id(group)))
        self._made.clear()
        self._asks.refuse(PeerDiedError("Nobody waits for this group any more."))
        dropped, self._open = [*self._open], {}
        for task in dropped if self._by_completion else ():
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

    def _start(self, new: Sequence[PreparedGroup]) -> None:
        """All of one step together where a function of the user's generates, and the engine samples nothing else."""
        if self.joins or self._by_completion:
            parts = [[group] for group in new]
        else:
            parts = [[*part] for _, part in groupby(new, _generated_with)]
        for groups in parts:
            self._open_task(groups)

    def _open_task(self, groups: Sequence[PreparedGroup]) -> None:
        if self._harness is not None:
            work = self._by_agent(self._harness, groups[0])
        else:
            work = self._by_turns(groups[0]) if self._trl.goes_by_turns else self._as_a_whole(groups)
        self._open[self._loop.create_task(self._noting_errors(groups, work))] = groups

    async def _noting_errors(
        self, groups: Sequence[PreparedGroup], work: Coroutine[Any, Any, None]
    ) -> list[SampledGroup]:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # noqa: BLE001  # of a prompt, a template, the user's code: it belongs to the job
            error = as_exception(raised)
            return [SampledGroup(prepared=group, error=error) for group in groups]
        finally:
            self._asks.happened.set()
        return [SampledGroup(prepared=group) for group in groups]

    async def _by_turns(self, group: PreparedGroup) -> None:
        copy = self._copy()
        try:
            with copy.trl.view.during(group.job, group.version):
                made = await self._conversed(group, copy)
            self._keep({group: made}, copy)
        except BaseException:
            self._release(copy)
            raise

    async def _conversed(self, group: PreparedGroup, copy: _Copy) -> GeneratedGroup:
        dialogues = Dialogues(copy.trl, group.job, group.version)
        tasks: list[asyncio.Task[None]] = []
        try:
            with self._asks.working():
                await self._begin(dialogues)
                tasks += [asyncio.create_task(self._converse(each, group, copy)) for each in dialogues.all]
                await asyncio.sleep(0)  # now each of them is working
            await asyncio.gather(*tasks)
            return dialogues.finish()
        except BaseException:
            for task in tasks:  # an error of one ends the others
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            raise

    async def _begin(self, dialogues: Dialogues) -> None:
        if not self._keeps_environments:
            dialogues.begin()
            return
        async with self._beginning:
            await self._threads.run(dialogues.begin, name=f"group {dialogues.job.seq}")

    async def _converse(self, dialogue: Dialogue, group: PreparedGroup, copy: _Copy) -> None:
        with self._asks.working():
            dialogue.begin(await self._asks.continued(_ask(group, dialogue, dialogue.prompt)))
            while dialogue.wants_tools:
                outcomes = await self._tools.run(dialogue.calls(), copy.calls_left)
                prompt = dialogue.prompt_after(outcomes)
                if prompt is None:
                    return
                dialogue.add(outcomes, await self._asks.continued(_ask(group, dialogue, prompt)))

    async def _by_agent(self, harness: Harness, group: PreparedGroup) -> None:
        with self._trl.view.during(group.job, group.version) as call:
            made = await harness.play(group)
        self._made[group] = replace(made, metrics=made.metrics | call.counted(), added=call.taken())

    async def _as_a_whole(self, groups: Sequence[PreparedGroup]) -> None:
        if not self.joins:
            torch.manual_seed(groups[0].seed)  # a rollout_func may sample with the worker's own model
        copy = self._copy()
        try:
            with self._asks.working():
                made = await self._whole.run(copy.trl, groups)
            self._keep(dict(zip(groups, made, strict=True)), copy)
        except BaseException:
            self._release(copy)
            raise

    async def _go_on(self) -> None:
        """Let all go on that can, until the engine has something to do."""
        happened = self._asks.happened
        if not (self._asks.are_sampled or happened.is_set()):
            with suppress(TimeoutError):
                await asyncio.wait_for(happened.wait(), WAKE_S)
        await _rounds()
        happened.clear()

    def _ended(self) -> list[SampledGroup]:
        ended: list[SampledGroup] = []
        for task in [task for task in self._open if task.done()]:
            groups, results = self._open.pop(task), task.result()
            if len(groups) > 1 and results[0].error is not None:  # the error belongs to one of them
                for group in groups:
                    self._open_task([group])
            else:
                ended += results
        return ended

    # Copies of the trainer, each with environments of its own

    def _copy(self) -> _Copy:
        return _Copy(self._idle.pop() if self._idle else self._trl.fork())

    def _keep(self, made: dict[PreparedGroup, GeneratedGroup], copy: _Copy) -> None:
        self._made.update(made)
        if self._keeps_environments:
            copy.unscored = len(made)
            self._unscored.update((id(group), copy) for group in made.values())
        else:
            self._release(copy)

    def _unscored_less(self, copy: _Copy) -> None:
        copy.unscored -= 1
        if copy.unscored == 0:
            self._release(copy)

    def _release(self, copy: _Copy) -> None:
        """Use it for other groups, unless a tool that was given up may still use its environments."""
        if not (self._keeps_environments and self._tools.still_running(copy.calls_left)):
            self._idle.append(copy.trl)


class _Copy:
    """A copy of the worker's trainer that generates some groups."""

    def __init__(self, trl: RolloutTrainer) -> None:
        self.trl = trl
        self.unscored = 0  # groups that use its environments
        self.calls_left: set[int] = set()  # of tools, that were given up


def _generated_with(group: PreparedGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the user's code sees of the job while it generates."""
    return group.job.sampling, group.job.trainer_state


def _ask(group: PreparedGroup, dialogue: Dialogue, prompt: Prompt) -> Ask:
    return Ask(
        job=group.job,
        version=group.version,
        turn=dialogue.transcript.turns,
        prompt_ids=[prompt.ids],
        images=prompt.images,
        fields=prompt.fields,
        place=dialogue.place,
    )


async def _rounds() -> None:
    for _ in range(ROUNDS):
        await asyncio.sleep(0)
