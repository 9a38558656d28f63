"""The warning that a run tips, on series of figures."""

from __future__ import annotations

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.training.corrections.metrics import EffectiveShare, effective_share, log_ratios, sums_of
from async_grpo.training.corrections.rule import rule
from async_grpo.training.corrections.tipping import (
    KL,
    SHARE,
    STEPS,
    Tipping,
    TippingCallback,
    load_of,
    tips_again,
    what_helps,
)

Series = list[tuple[float, float]]  # the effective sample size, and the KL to the sampler

FRESH: Series = [(1.0, 0.0)] * 100
STEADY: Series = [(0.97, 0.004)] * 100
MISMATCH: Series = [(0.99, 1e-3), (0.99, 2e-3)] * 50  # a sampler in bfloat16
OUTLIERS: Series = [(0.3 if step % 7 == 0 else 0.98, 0.05 if step % 7 == 0 else 0.005) for step in range(100)]
SETTLES: Series = [(0.6, 0.3)] * 12 + [(0.97, 0.01)] * 88  # a policy moves most in the beginning
STILL: Series = [(1.0, 1e-5)] * 50 + [(1.0, 1e-3)] * 50  # a hundredfold of nothing


def first(series: Series) -> tuple[int, str] | None:
    """The step of the first warning, and its sentence."""
    tipping = Tipping()
    said = ((step, tipping.tips(*figures)) for step, figures in enumerate(series, start=1))
    return next(((step, what) for step, what in said if what), None)


@pytest.mark.parametrize("series", [FRESH, STEADY, MISMATCH, OUTLIERS, SETTLES, STILL])
def test_series_of_runs_that_end_well(series: Series) -> None:
    assert first(series) is None


def test_an_effective_sample_size_that_stays_low_and_a_kl_that_rises_threefold() -> None:
    step, what = first(STEADY + [(0.6, 0.005)] * 30) or (0, "")
    assert 100 + STEPS < step <= 100 + 2 * STEPS
    assert "the effective sample size is 0.6" in what
    assert "the KL to the sampler 0.005 nats a token, of which the median so far is 0.004" in what
    step, _ = first([(0.97, 0.01)] * 100 + [(0.9, 0.05)] * 30) or (0, "")
    assert 100 + STEPS < step <= 100 + 2 * STEPS


def test_nothing_is_said_before_the_means_of_as_many_steps() -> None:
    series = [(0.1, 1.0)] * 2 * STEPS
    assert first(series[: 2 * STEPS - 2]) is None
    assert first(series) is not None


class Run:
    """A run of these figures, with what the callback keeps."""

    def __init__(self, figures: list[dict[str, float]]) -> None:
        self.kept: list[str] = []
        self._now: dict[str, float] = {}
        callback = TippingCallback(lambda: self._now, ["this", "that"], lambda *, tips: self.kept.append(tips))
        for step, self._now in enumerate(figures, start=1):
            callback.on_step_end(None, SimpleNamespace(global_step=step), None)


def test_one_warning_with_the_step_and_what_helps(caplog: Any) -> None:
    (warning,) = Run([{SHARE: 0.5, KL: 0.1}] * 40).kept
    assert warning.startswith("The policy runs away from its rollouts at step 19: ")
    assert warning.endswith("the most helpful first: this; that.")


def test_a_loss_that_shows_no_log_probabilities_is_not_watched() -> None:
    assert Run([{"loss": 0.1}] * 40).kept == []


def test_only_what_the_run_has_not_done_yet_is_advised() -> None:
    assert what_helps(rule("bypass"), 0, "sequence", 4e-4) == ["half the learning rate, 0.0002"]
    correction, rate, staleness, gspo = what_helps(rule("tis"), 4, "token", 1e-6)
    assert correction.startswith("--correction bypass") and "importance_sampling_level" in gspo
    assert staleness == "a --max-staleness below 4"
    assert rate == "half the learning rate, 5e-07"


@pytest.mark.parametrize(
    ("rate", "max_staleness", "again"), [(4e-4, 2, True), (2e-4, 5, True), (4e-4, 1, False), (2e-4, 2, False)]
)
def test_a_resume_warns_where_rate_times_staleness_is_no_smaller_than_where_the_run_tipped(
    rate: float, max_staleness: int, again: bool
) -> None:
    said = tips_again(load_of(rate, max_staleness), load_of(4e-4, 2))
    assert bool(said) is again and ("was 0.0012" in said) is again
    assert tips_again(load_of(rate, max_staleness), 0.0) == "", "it never tipped"


# --- The effective sample size of sequences against a table made by hand, over micro-batches and ranks -----------

# Four completions of three tokens. Of the second one token is padding and one a tool's, and of the third the loss
# counts nothing.
W = [[2.0, 0.5, 3.0], [0.5, 7.0, 9.0], [4.0, 4.0, 4.0], [1.0, 2.0, 0.25]]
COMPLETION_MASK = [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
TOOL_MASK = [[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]]

# By hand: w = 3, 0.5, 0.5, so ESS = 4^2 / (9 + 0.25 + 0.25) = 16 / 9.5, of 3.
BY_HAND = 16 / 9.5 / 3

LOG_MU = -1.0


def batch(rows: slice = slice(None)) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of a loss, and its log-probabilities."""
    inputs = {
        "completion_mask": torch.tensor(COMPLETION_MASK)[rows],
        "tool_mask": torch.tensor(TOOL_MASK)[rows],
        "sampling_per_token_logps": torch.full((4, 3), LOG_MU)[rows],
    }
    return inputs, torch.tensor([[LOG_MU + log(w) for w in row] for row in W])[rows]


def shared(metrics: dict[str, float]) -> EffectiveShare:
    return EffectiveShare(lambda own: own, metrics.__setitem__)


@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(0, 1), slice(1, 3), slice(3, 4)]], ids=["one", "three"])
def test_the_share_of_one_and_of_three_micro_batches_is_that_by_hand(parts: list[slice]) -> None:
    metrics: dict[str, float] = {}
    share = shared(metrics)
    for part in parts:
        share.saw(*batch(part))
    share.on_pre_optimizer_step()
    assert metrics == {"async/ess_sequences": pytest.approx(BY_HAND, abs=1e-6)}


def test_a_loss_that_shows_no_log_probabilities_has_no_share() -> None:
    metrics: dict[str, float] = {}
    shared(metrics).on_pre_optimizer_step()
    assert metrics == {}


def test_each_step_has_its_own_share() -> None:
    metrics: dict[str, float] = {}
    share = shared(metrics)
    for rows, expected in ((slice(0, 4), BY_HAND), (slice(0, 1), 1.0), (slice(2, 3), 1.0)):
        share.saw(*batch(rows))
        share.on_pre_optimizer_step()
        assert metrics["async/ess_sequences"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("log_pi", "log_mu", "expected"),
    [
        ([[0.0] * 3] * 4, [[0.0] * 3] * 4, 1.0),
        ([[900.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3], [[0.0] * 3] * 4, 1 / 3),  # one sequence outweighs all
        ([[-900.0] * 3, [-1350.0] * 3, [0.0] * 3, [-900.0] * 3], [[0.0] * 3] * 4, 1.0),  # equally unlikely and heavy
        ([[0.0] * 3] * 4, [[float("-inf")] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3], 1 / 3),
        ([[float("nan")] * 3] * 4, [[0.0] * 3] * 4, 1.0),
    ],
)
def test_no_ratio_is_too_large_to_be_computed(log_pi: Any, log_mu: Any, expected: float) -> None:
    logs = log_ratios(torch.tensor(log_pi), torch.tensor(log_mu), torch.tensor(COMPLETION_MASK).bool())
    assert effective_share(sums_of(logs)[None]) == pytest.approx(expected, abs=1e-9)


def test_the_share_of_several_ranks_is_that_of_one_process() -> None:
    gathered: list[Tensor] = []
    metrics: dict[str, float] = {}
    for rows in (slice(0, 2), slice(2, 4)):
        share = EffectiveShare(lambda own: gathered.append(own) or torch.cat(gathered), metrics.__setitem__)
        share.saw(*batch(rows))
        share.on_pre_optimizer_step()
    assert metrics == {"async/ess_sequences": pytest.approx(BY_HAND, abs=1e-6)}, "as the last rank has it"
