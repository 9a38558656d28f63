"""The episodes of a batch, run together: also where a loop runs already, as in a notebook."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_grpo.envs.conversations import Lockstep


class Trainer:
    """Continues each prompt by one token."""

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        return [[len(prompt)] for prompt in prompts], None


def answers() -> list[list[int]]:
    lockstep = Lockstep(Trainer())

    async def episode(prompt: list[int]) -> list[int]:
        first, _ = await lockstep.tokens(prompt)
        second, _ = await lockstep.tokens([*prompt, *first])
        return first + second

    return lockstep.run([episode([7]), episode([7, 8])])


def test_in_a_running_loop_they_run_too_and_it_goes_on() -> None:
    async def cell() -> list[list[int]]:
        inner = answers()
        assert asyncio.get_running_loop() is asyncio.get_event_loop()
        await asyncio.sleep(0)
        return inner

    assert asyncio.run(cell()) == answers() == [[1, 2], [2, 3]]


def test_an_episode_that_raises_leaves_the_loop_outside_as_it_was() -> None:
    async def fails() -> None:
        raise LookupError("no such tool")

    async def cell() -> None:
        with pytest.raises(LookupError, match="no such tool"):
            Lockstep(Trainer()).run([fails()])
        await asyncio.sleep(0)

    asyncio.run(cell())
