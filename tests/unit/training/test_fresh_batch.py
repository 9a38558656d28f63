"""The guard of fresh batches on numbers made by hand: what counts, how many tokens decide, and what ranks do."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.errors import RunRefused
from async_grpo.training.corrections.fresh_batch import LEAST, Bound, FreshBatch

STOPS = Bound(nats=0.5, basis="as bfloat16 may round", stops=True)
STEP = SimpleNamespace(global_step=0)


def guard(bound: Bound = STOPS, gather: Any = lambda own: own, alone: Tensor | None = None) -> FreshBatch:
    return FreshBatch(bound, gather, lambda farthest, training: alone, str)


def batch(apart: Tensor, **changes: Any) -> tuple[dict[str, Any], Tensor]:
    """Inputs of a loss, and log pi, which is `apart` from log mu."""
    rows, tokens = apart.shape
    ones = torch.ones(rows, tokens, dtype=torch.int64)
    inputs = {"completion_ids": torch.arange(tokens).expand(rows, -1), "completion_mask": ones, "prompt_ids": ones}
    inputs |= {"prompt_mask": ones, "sampling_per_token_logps": torch.full((rows, tokens), -2.0)}
    return {**inputs, "policy_version": torch.zeros(rows, dtype=torch.int64), **changes}, apart - 2.0


def judged(found: FreshBatch, *batches: tuple[dict[str, Any], Tensor]) -> None:
    for inputs, log_pi in batches:
        found.saw(inputs, log_pi, 0)
    found.on_pre_optimizer_step(None, STEP)


def far(value: float = 1.0, tokens: int = LEAST) -> Tensor:
    return torch.full((2, tokens // 2), value)


@pytest.mark.parametrize("value", [inf, -inf, 1e6])
def test_one_token_never_decides(value: float) -> None:
    for tokens in (8, LEAST):
        apart = far(0.0, tokens)
        apart[0, 3] = value
        judged(guard(Bound(nats=0.02, basis="", stops=True)), batch(apart))


@pytest.mark.parametrize(("value", "step"), [(0.51, 4), (0.87, 3), (4.0, 1)])
def test_small_batches_are_judged_together_as_soon_as_no_others_could_make_it_right(value: float, step: int) -> None:
    """Each step has two micro-batches."""
    watch, small = guard(), [batch(far(value + shift, LEAST // 8)) for shift in (0.25, -0.25)]
    for number in range(1, step):
        judged(watch, *small)
        assert watch.undecided == {"undecided_tokens": number * LEAST // 4, "undecided_nats": value}
    said = f"{value:g} nats apart, the mean of {step * LEAST // 4} tokens.*at most 0.5 are expected"
    with pytest.raises(RunRefused, match=said):
        judged(watch, *small)
    assert not watch.undecided


@pytest.mark.parametrize(
    ("value", "tokens", "stops", "says"),
    [
        (0.06, LEAST, True, "at most 0.05 are expected"),
        (1.0, LEAST, False, "at most 0.5 are expected"),
        (1.0, LEAST // 4, True, "So few tokens do not stop a run."),
    ],
)
def test_what_does_not_stop_a_run_warns_once(
    value: float, tokens: int, stops: bool, says: str, warnings: list[str]
) -> None:
    watch = guard(replace(STOPS, stops=stops))
    for _ in range(2):
        judged(watch, batch(far(value, tokens)))
    [warning] = warnings
    assert says in warning


def test_small_batches_that_agree_end_nothing_and_later_ones_only_warn(warnings: list[str]) -> None:
    watch = guard()
    for _ in range(4):
        assert watch.waits
        judged(watch, batch(far(0.04, LEAST // 4)))
    assert not watch.waits and not watch.undecided and not warnings
    judged(watch, batch(far()))
    assert len(warnings) == 1


def test_what_does_not_count() -> None:
    """Padding, what tools wrote, tokens without a log-probability, and rollouts of another version."""
    unknown = far(nan)
    masked = {"tool_mask": torch.zeros(2, LEAST // 2, dtype=torch.int64)}
    stale = {"policy_version": torch.tensor([-1, -1])}
    watch = guard()
    judged(watch, batch(unknown), batch(far(), **masked), batch(far(), **stale))
    assert watch.waits, "there was no token to judge"
    assert watch.undecided == {"undecided_tokens": 0, "undecided_nats": 0.0}


def test_what_is_apart_by_design_is_not_judged() -> None:
    watch = guard(Bound())
    judged(watch, batch(far()))
    assert not watch.waits and not watch.undecided


@pytest.mark.parametrize(
    ("alone", "cause"),
    [(far(-2.0)[0], "how its batch is padded"), (far(5.0)[0], "differs also alone"), (None, "Usual causes are")],
)
def test_the_cause_is_what_the_completion_alone_says(alone: Tensor | None, cause: str) -> None:
    with pytest.raises(RunRefused, match=cause):
        judged(guard(alone=alone), batch(far()))


@pytest.mark.parametrize(("tokens", "value"), [(LEAST // 2, 1.0), (LEAST // 4, 1.25)])
def test_ranks_decide_together_by_the_bound_of_rank_0(tokens: int, value: float) -> None:
    """Two ranks, neither of which has enough: both stop, and rank 0 says why."""
    half, seen = far(value, tokens), [value * tokens, float(tokens)]
    rows = torch.tensor([[*seen, 0.5, 1.0, 1.0], [*seen, inf, 0.0, 1.0]])
    told: list[Tensor] = []

    def gather(own: Tensor) -> Tensor:
        told.append(own[0])
        return rows

    for bound, said in ((STOPS, "at most 0.5"), (Bound(), "rank 0 says how")):
        with pytest.raises(RunRefused, match=said):
            judged(guard(bound, gather), batch(half))
    assert torch.stack(told).equal(rows)


def test_a_rank_without_tokens_takes_part() -> None:
    rows = torch.tensor([[0.0, 0.0, 0.5, 1.0, 0.0], [LEAST * 1.0, LEAST * 1.0, inf, 0.0, 1.0]])
    with pytest.raises(RunRefused, match=r"at most 0\.5"):
        guard(gather=lambda own: rows).on_pre_optimizer_step(None, STEP)
