"""Reward functions that change what they keep: one warning for each, which names what. Caches are left alone."""

from __future__ import annotations

import functools
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from async_grpo.rollout.held_data import FIRST_CALLS, HeldData
from async_grpo.rollout.trl_view import NotHere

calls = 0
log = logging.getLogger("a reward")
threads = ThreadPoolExecutor()


def of_a_global(x: int) -> None:
    global calls
    calls += 1


def of_a_closure() -> Callable[[int], Any]:
    count = 0

    def reward(x: int) -> None:
        nonlocal count
        count += 1

    return reward


def holding(held: Any, change: Callable[[Any, int], object]) -> Callable[[int], Any]:
    return lambda x: change(held, x)


def of_an_attribute(x: int) -> None:
    of_an_attribute.seen = getattr(of_an_attribute, "seen", 0) + x


def of_an_argument(x: int, history: list[int] = []) -> None:  # noqa: B006  # as users keep data
    history.append(x)


def of_a_partial(x: int, *, best: dict[str, int]) -> None:
    best["x"] = max(best["x"], x)


class Instance:
    def __init__(self) -> None:
        self.mean = 0.0

    def __call__(self, x: int) -> None:
        self.mean += 0.1 * (x - self.mean)

    def method(self, x: int) -> None:
        self(x)


class OfAClass:
    number: ClassVar[int] = 0

    def __call__(self, x: int) -> None:
        OfAClass.number += 1


@dataclass(slots=True)
class Slots:
    number: int = 0

    def __call__(self, x: int) -> None:
        self.number += 1


def evict(cache: OrderedDict[int, int], x: int) -> None:
    cache[x] = x
    if len(cache) > 2:
        cache.popitem(last=False)


CHANGING = [
    ("calls", of_a_global),
    ("count", of_a_closure()),
    ("of_an_attribute.seen", of_an_attribute),
    ("history", of_an_argument),
    ("best", partial(of_a_partial, best={"x": -1})),
    ("Instance.mean", Instance()),
    ("Instance.mean", Instance().method),
    ("OfAClass, OfAClass.number", OfAClass()),
    ("Slots.number", Slots()),
    ("held", holding(Counter("a"), lambda held, x: held.update("a"))),
    ("held", holding({"nested": [0]}, lambda held, x: held["nested"].append(x))),
    ("held", holding({1}, lambda held, x: held.add(x))),
    ("held", holding(SimpleNamespace(n=0), lambda held, x: setattr(held, "n", held.n + 1))),
    ("held", holding(torch.zeros(2), lambda held, x: held.add_(1))),
    ("held", holding(OrderedDict(), evict)),
]


class Hostile:
    """A stand-in of a worker's trainer ends the run when it is used; others raise whatever they like."""

    def __init__(self) -> None:
        self.optimizer: Any = NotHere(None, "optimizer", "")
        self.mock, self.number = Mock(), float("nan")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __hash__(self) -> int:
        raise RuntimeError("no")

    def reward(self, x: int) -> None:
        self.number + x


UNCHANGING = [
    lambda x: x,
    Hostile().reward,
    holding([Hostile()], lambda held, x: x),
    holding({}, lambda cache, x: cache.setdefault(x, [x])),
    holding({}, lambda cache, x: cache.update((x * 300 + number, number) for number in range(300))),
    holding({0: {}}, lambda cache, x: cache[0].update((x * 9 + number, number) for number in range(9))),
    holding(SimpleNamespace(model=None), lambda held, x: setattr(held, "model", "loaded")),
    functools.lru_cache(lambda x: x),
    lambda x: threads.submit(log.info, x).result(),
]


def called(functions: list[Any], times: int) -> None:
    held, names = HeldData(), [f"number {number}" for number in range(len(functions))]
    trainer = SimpleNamespace(reward_funcs=functions, reward_func_names=names)
    for call in range(times):
        with held.around(trainer) if held.calls_left > 0 else nullcontext():
            for function in functions:
                function(call)


@pytest.mark.parametrize(("name", "function"), CHANGING)
def test_a_function_that_changes_what_it_keeps_is_warned_of_once(name: str, function: Any, warnings: list[str]) -> None:
    called([*UNCHANGING, function], FIRST_CALLS)
    (line,) = warnings
    assert line.startswith(f"the reward function number {len(UNCHANGING)} changes {name} when it is called: ")


def test_only_the_first_calls_are_looked_at(warnings: list[str]) -> None:
    called([holding([0], lambda held, x: held.append(x) if x >= FIRST_CALLS else None)], 2 * FIRST_CALLS)
    assert warnings == []
