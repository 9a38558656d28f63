"""Prompts that wait for tokens, and how they are given to the engine.

An engine whose batch can be joined gets each as it comes. Any other decodes a batch to its end before the next, so all
dialogues go in lockstep: it gets the prompts once none of them has anything left to do without tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

from async_grpo.errors import UserCodeExit
from async_grpo.records import Job
from async_grpo.rollout.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.rollout.trl_trainer import Images
from async_grpo.tokens import Tokens

T = TypeVar("T")


@dataclass(eq=False, slots=True, kw_only=True)
class Ask:
    """Prompts of one job that want a continuation each."""

    job: Job
    version: int
    turn: int
    prompt_ids: list[list[int]]
    images: Images = None
    fields: Any = None  # of all the prompts together
    place: int | None = None  # of a dialogue's one prompt among the job's completions
    answer: asyncio.Future[SampledGroup] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Asks:
    """The asks of a worker, on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self.happened = asyncio.Event()  # somebody asks, or has ended
        self._engine = engine
        self._waiting: list[Ask] = []
        self._sampling: dict[PreparedGroup, list[Ask]] = {}
        self._working = 0  # that may still ask

    @property
    def are_sampled(self) -> bool:
        return bool(self._sampling)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around what does something that other asks wait for, where the engine samples in lockstep."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            self.happened.set()

    async def side_by_side(
        self, works: Sequence[Coroutine[Any, Any, T]], on_error: Callable[[BaseException], None] = lambda error: None
    ) -> list[T]:
        """What the recorders of a group's completions return. An error of one ends the others, after `on_error`."""
        with self.working():
            tasks = [asyncio.create_task(work) for work in works]
            await asyncio.sleep(0)  # now each of them is working
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            on_error(error)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise

    async def sampled(self, ask: Ask) -> SampledGroup:
        """Called by what is `working`, and is not while it waits."""
        self._waiting.append(ask)
        self._working -= 1
        self.happened.set()
        try:
            return await ask.answer
        finally:
            self._working += 1

    async def continued(self, ask: Ask) -> Tokens:
        """The tokens of an ask with one prompt."""
        return (await self.sampled(ask)).tokens[0]

    def step(self) -> bool:
        """Have the engine sample; returns whether any answers were given."""
        batch = self._batch()
        if not batch and not self._sampling:
            return False
        ended = self._engine.sample(batch)
        for sampled in ended:
            for index, ask in enumerate(self._sampling.pop(sampled.prepared)):
                _answer(ask, sampled, index)
        return bool(ended)

    def refuse(self, error: Exception) -> None:
        """Nobody will sample what is asked for."""
        for ask in [*self._waiting, *(ask for asks in self._sampling.values() for ask in asks)]:
            if not ask.answer.done():
                ask.answer.set_exception(error)
        self._waiting.clear()
        self._sampling.clear()

    def _batch(self) -> list[PreparedGroup]:
        if not self._engine.joins and (self._sampling or self._working):
            return []
        asks, self._waiting = [ask for ask in self._waiting if not ask.answer.done()], []
        asks.sort(key=lambda ask: (ask.job.seq, ask.place or 0))
        parts = [[ask] for ask in asks] if self._engine.joins else _together(asks)
        batch = {_prepared(part): part for part in parts}
        self._sampling.update(batch)
        return list(batch)


def _together(asks: Sequence[Ask]) -> list[list[Ask]]:
    """The dialogues of a job side by side."""
    return [list(part) for _, part in groupby(asks, lambda ask: (ask.job.seq, ask.turn, ask.place is None))]


def _prepared(asks: Sequence[Ask]) -> PreparedGroup:
    first = asks[0]
    images = [image for ask in asks for image in ask.images or [None] * len(ask.prompt_ids)]
    return PreparedGroup(
        job=first.job,
        version=first.version,
        prompt_ids=[list(ids) for ask in asks for ids in ask.prompt_ids],
        images=images if any(images) else None,
        fields=tuple(ask.fields or {} for ask in asks) if any(ask.fields for ask in asks) else (),
        turn=first.turn,
        place=first.place or 0,
    )


def _answer(ask: Ask, sampled: SampledGroup, index: int) -> None:
    """Give an ask its own of what was sampled for several dialogues, which have one prompt each."""
    if ask.answer.done():  # nobody waits for it any more
        return
    if sampled.error is not None:
        ask.answer.set_exception(as_exception(sampled.error))
        return
    mine = slice(None) if ask.place is None else slice(index, index + 1)
    ask.answer.set_result(SampledGroup(prepared=sampled.prepared, tokens=sampled.tokens[mine]))


def as_exception(error: BaseException) -> Exception:
    """An error that can be raised on an event loop: `SystemExit` would end it."""
    return error if isinstance(error, Exception) else UserCodeExit(f"{type(error).__name__}: {error}")
