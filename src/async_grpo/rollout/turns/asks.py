"""Prompts that wait for tokens, and how they are given to the engine.

An engine whose batch can be joined gets each as it comes. Any other decodes a batch to its end before the next, so all
dialogues go in lockstep: it gets the prompts once none of them has anything left to do without tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, groupby, islice
from typing import Any, TypeVar

from async_grpo.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.errors import UserCodeExit
from async_grpo.tokens import Tokens

T = TypeVar("T")


_Ask = tuple[PreparedGroup, "asyncio.Future[SampledGroup]"]  # prompts of one job, and their answer


class Asks:
    """The asks of a worker, on its event loop."""

    def __init__(self, engine: Engine) -> None:
        self.happened = asyncio.Event()  # somebody asks, or has ended
        self._engine = engine
        self._waiting: list[_Ask] = []
        self._sampling: dict[PreparedGroup, list[_Ask]] = {}
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

    async def sampled(self, group: PreparedGroup) -> SampledGroup:
        """Called by what is `working`, and is not while it waits."""
        answer: asyncio.Future[SampledGroup] = asyncio.get_running_loop().create_future()
        self._waiting.append((group, answer))
        self._working -= 1
        self.happened.set()
        try:
            return await answer
        finally:
            self._working += 1

    async def continued(self, group: PreparedGroup) -> Tokens:
        return (await self.sampled(group)).tokens[0]

    def step(self) -> bool:
        """Have the engine sample; returns whether any answers were given."""
        batch = self._batch()
        if not batch and not self._sampling:
            return False
        ended = self._engine.sample(batch)
        for sampled in ended:
            left = iter(sampled.tokens)
            for group, answer in self._sampling.pop(sampled.prepared):
                _give(answer, replace(sampled, prepared=group, tokens=[*islice(left, len(group.prompt_ids))]))
        return bool(ended)

    def refuse(self, error: Exception) -> None:
        """Nobody will sample what is asked for."""
        for group, answer in [*self._waiting, *chain.from_iterable(self._sampling.values())]:
            _give(answer, SampledGroup(prepared=group, error=error))
        self._waiting.clear()
        self._sampling.clear()

    def _batch(self) -> list[PreparedGroup]:
        if not self._engine.capabilities.joins and (self._sampling or self._working):
            return []
        asks, self._waiting = [ask for ask in self._waiting if not ask[1].done()], []
        asks.sort(key=lambda ask: (ask[0].job.seq, ask[0].first_index))
        parts = [[ask] for ask in asks]
        if not self._engine.capabilities.joins:
            parts = [[*part] for _, part in groupby(asks, lambda ask: (ask[0].job.seq, ask[0].turn))]
        batch = {_together([group for group, _ in part]): part for part in parts}
        self._sampling.update(batch)
        return list(batch)


def _together(groups: Sequence[PreparedGroup]) -> PreparedGroup:
    """The prompts of one job side by side."""
    first, *others = groups
    if not others:
        return first
    images = [image for group in groups for image in group.images or [None] * len(group.prompt_ids)]
    return replace(
        first,
        prompt_ids=[ids for group in groups for ids in group.prompt_ids],
        images=images if any(images) else None,
        fields=[fields for group in groups for fields in group.fields or [{}]] if any(g.fields for g in groups) else (),
    )


def _give(answer: asyncio.Future[SampledGroup], sampled: SampledGroup) -> None:
    if answer.done():  # nobody waits for it any more
        return
    if sampled.error is not None:
        answer.set_exception(as_exception(sampled.error))
    else:
        answer.set_result(sampled)


def as_exception(error: BaseException) -> Exception:
    """An error that can be raised on an event loop: `SystemExit` would end it."""
    return error if isinstance(error, Exception) else UserCodeExit(f"{type(error).__name__}: {error}")
