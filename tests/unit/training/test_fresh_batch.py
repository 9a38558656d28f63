"""The guard of fresh batches on numbers made by hand: what counts, how many tokens decide, and what ranks do."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.errors import RunRefused
from async_grpo.training.corrections.fresh_batch import LEAST, Bound, Farthest, FreshBatch

STOPS = Bound(nats=0.5, basis="as bfloat16 may round", stops=True)
STEP = SimpleNamespace(global_step=0)


def guard(bound: Bound = STOPS, gather: Any = lambda own: own, alone: Tensor | None = None) -> FreshBatch:
    def repeat(farthest: Farthest, training: bool) -> Tensor | None:
        return alone

    return FreshBatch(bound, gather, repeat, str)


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


def test_more_than_the_bound_stops() -> None:
    with pytest.raises(RunRefused, match=r"1 nats apart, the mean of 256 tokens.*at most 0\.5 are expected"):
        judged(guard(), batch(far()))


def test_micro_batches_count_together() -> None:
    with pytest.raises(RunRefused, match=r"0\.75 nats apart"):
        judged(guard(), batch(far(0.5, LEAST // 2)), batch(far(1.0, LEAST // 2)))


@pytest.mark.parametrize("value", [inf, -inf, 1e6])
def test_one_token_never_decides(value: float) -> None:
    apart = far(0.0)
    apart[0, 3] = value
    judged(guard(Bound(nats=0.02, basis="", stops=True)), batch(apart))


def test_what_does_not_count() -> None:
    """Padding, what tools wrote, tokens without a log-probability, and rollouts of another version."""
    unknown = far(nan)
    masked = {"tool_mask": torch.zeros(2, LEAST // 2, dtype=torch.int64)}
    stale = {"policy_version": torch.tensor([-1, -1])}
    watch = guard()
    judged(watch, batch(unknown), batch(far(), **masked), batch(far(), **stale))
    assert watch.waits, "there was no token to judge"


def test_steps_without_fresh_tokens_leave_nothing_behind() -> None:
    """A run of stale rollouts is never judged, and each step costs as much as the first."""
    watch, stale = guard(), {"policy_version": torch.tensor([-1, -1])}
    for _ in range(3):
        judged(watch, batch(far(), **stale))
    assert watch.waits and isinstance(watch._sums, Tensor) and watch._sums.tolist() == [0, 0]


def test_what_is_apart_by_design_is_not_judged() -> None:
    watch = guard(Bound())
    judged(watch, batch(far()))
    assert not watch.waits


@pytest.mark.parametrize(
    ("alone", "cause"),
    [(far(-2.0)[0], "how its batch is padded"), (far(5.0)[0], "differs also alone"), (None, "Usual causes are")],
)
def test_the_cause_is_what_the_completion_alone_says(alone: Tensor | None, cause: str) -> None:
    with pytest.raises(RunRefused, match=cause):
        judged(guard(alone=alone), batch(far()))


def test_ranks_decide_together_by_the_bound_of_rank_0() -> None:
    """Two ranks with half of the tokens each: both stop, and rank 0 says why."""
    half = far(tokens=LEAST // 2)
    of_rank_0, of_rank_1 = [LEAST / 2, LEAST / 2, 0.5, 1.0, 1.0], [LEAST / 2, LEAST / 2, inf, 0.0, 1.0]
    rows = torch.tensor([of_rank_0, of_rank_1])
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
