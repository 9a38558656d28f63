"""The formulas of the corrections against tables made by hand, and what is refused of them."""

from __future__ import annotations

from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.settings import CORRECTION_LEVELS, CORRECTIONS
from async_grpo.training.corrections.checks import check, describe
from async_grpo.training.corrections.rule import Rule, rule
from async_grpo.training.corrections.trl_loss import Correction, _clip, check_shapes
from async_grpo.training.corrections.weights import limited, loss_mask, ratios

# Two completions of four tokens. The last token of the second is padding, and its second is a tool's.
W = [[0.25, 1.0, 2.5, 8.0], [0.5, 7.0, 1.5, 9.0]]
MASK = [[1, 1, 1, 1], [1, 0, 1, 0]]
LOSS = SimpleNamespace(loss_type="grpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=2.0)

# By hand: the product of the first is 0.25 * 1 * 2.5 * 8 = 5, its geometric mean 5 ** (1/4) = 1.495349; those of the
# second are 0.5 * 1.5 = 0.75 and 0.75 ** (1/2) = 0.866025. What the loss does not count has the weight 1 of a token.
TABLE: dict[tuple[str, str], list[list[float]]] = {
    ("decoupled", "token"): [[0.25, 1.0, 2.5, 0.0], [0.5, 1.0, 1.5, 1.0]],
    ("decoupled", "geometric"): [[1.495349], [0.866025]],
    ("tis", "token"): [[0.25, 1.0, 2.0, 2.0], [0.5, 1.0, 1.5, 1.0]],
    ("tis", "sequence"): [[5.0], [0.75]],
    ("tis", "geometric"): [[1.495349], [0.866025]],
    ("icepop", "token"): [[0.0, 1.0, 2.5, 0.0], [0.5, 1.0, 1.5, 1.0]],
    ("icepop", "sequence"): [[0.0], [0.75]],
    ("icepop", "geometric"): [[0.0], [0.0]],
}
BOUNDED: dict[tuple[str, str, float | None, float | None], list[list[float]]] = {
    ("tis", "token", 0.5, 5.0): [[0.5, 1.0, 2.5, 5.0], [0.5, 1.0, 1.5, 1.0]],
    ("tis", "sequence", None, 3.0): [[3.0], [0.75]],
    ("tis", "geometric", 0.9, 1.1): [[1.1], [0.9]],
    ("icepop", "token", 0.6, None): [[0.0, 1.0, 2.5, 0.0], [0.0, 1.0, 1.5, 1.0]],
    ("icepop", "sequence", 0.0, 10.0): [[5.0], [0.75]],
    ("icepop", "geometric", 0.8, 1.2): [[0.0], [0.866025]],
    ("decoupled", "token", None, 2.0): [[0.25, 1.0, 0.0, 0.0], [0.5, 1.0, 1.5, 1.0]],
}

LOG_MU = -1.0


def logs(values: list[list[float]]) -> torch.Tensor:
    """Log-probabilities whose ratio to `LOG_MU` is `values`."""
    return torch.tensor([[LOG_MU + log(value) for value in row] for row in values])


def weights(chosen: Rule) -> torch.Tensor:
    return limited(ratios(logs(W), torch.full((2, 4), LOG_MU), torch.tensor(MASK).bool(), chosen.level), chosen)


@pytest.mark.parametrize(("name", "level"), TABLE)
def test_weights_are_those_of_the_hand_made_table(name: str, level: str) -> None:
    assert_close(weights(rule(name, level)), torch.tensor(TABLE[name, level]), atol=2e-6, rtol=0)


@pytest.mark.parametrize(("name", "level", "least", "most"), BOUNDED)
def test_weights_between_other_bounds(name: str, level: str, least: Any, most: Any) -> None:
    found = weights(rule(name, level, least, most))
    assert_close(found, torch.tensor(BOUNDED[name, level, least, most]), atol=2e-6, rtol=0)


def test_every_combination_is_in_the_table_or_refused() -> None:
    for name in CORRECTIONS:
        for level in CORRECTION_LEVELS:
            if (name, level) not in TABLE:
                with pytest.raises(UsageError, match="--correction-level"):
                    rule(name, level)


@pytest.mark.parametrize("name", ["bypass", "trl", "none"])
def test_bounds_are_refused_where_there_is_no_weight(name: str) -> None:
    with pytest.raises(UsageError, match=f"--correction-max does nothing with --correction {name}"):
        rule(name, most=3.0)
    with pytest.raises(UsageError, match=f"--correction-min does nothing with --correction {name}"):
        rule(name, least=0.0)


@pytest.mark.parametrize(("least", "most"), [(1.5, None), (None, 0.9), (1.0, 1.0)])
def test_bounds_that_leave_out_fresh_rollouts_are_refused(least: float | None, most: float | None) -> None:
    with pytest.raises(UsageError, match="weight of a fresh rollout is 1"):
        rule("tis", "token", least, most)


def test_a_ratio_that_overflows_or_is_unknown_is_no_nan() -> None:
    log_pi = torch.tensor([[200.0, float("nan"), -200.0]])
    mask = torch.ones(1, 3).bool()
    for name, expected in (("icepop", [0.0, 1.0, 0.0]), ("tis", [2.0, 1.0, 0.0]), ("decoupled", [0.0, 1.0, 0.0])):
        chosen = rule(name)
        assert limited(ratios(log_pi, torch.zeros(1, 3), mask, chosen.level), chosen).tolist() == [expected]


# --- On a batch -------------------------------------------------------------------------------------------


class Metrics(dict[str, list[float]]):
    def append(self, name: str, value: float) -> None:
        self.setdefault(name, []).append(value)


def correction(chosen: Rule, metrics: Metrics | None = None, *, own_loss: bool = False) -> Correction:
    return Correction(
        rule=chosen,
        own_loss=own_loss,
        clip=_clip(LOSS),
        log_pi_old=lambda _: logs(W),
        append=(Metrics() if metrics is None else metrics).append,
    )


def batch(advantages: list[Any]) -> dict[str, Any]:
    return {
        "completion_ids": torch.zeros(2, 4, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
        "tool_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 1, 1]]),
        "sampling_per_token_logps": torch.full((2, 4), LOG_MU),
        "advantages": torch.tensor(advantages),
        "policy_version": torch.tensor([3, 5]),
        "is_long": torch.tensor([True, False]),
    }


ADVANTAGES = {"[B]": [1.0, -2.0], "[B, C]": [[1.0, 2.0, 3.0, 4.0], [-1.0, 5.0, -3.0, 0.0]]}


@pytest.mark.parametrize("shape", ADVANTAGES)
@pytest.mark.parametrize(("name", "level"), TABLE)
def test_an_own_loss_gets_the_weights_in_advantages_of_either_shape(name: str, level: str, shape: str) -> None:
    given = batch(ADVANTAGES[shape])
    before = given["advantages"] if shape == "[B, C]" else given["advantages"][:, None]
    correction(rule(name, level), own_loss=True)(given)
    assert_close(given["advantages"], before * torch.tensor(TABLE[name, level]), atol=1e-5, rtol=0)
    assert_close(given["old_per_token_logps"], logs(W))


@pytest.mark.parametrize("shape", ADVANTAGES)
@pytest.mark.parametrize(("name", "level"), TABLE)
def test_trls_loss_gets_the_weights_once_its_forward_pass_is_done(name: str, level: str, shape: str) -> None:
    given = batch(ADVANTAGES[shape])
    asked = correction(rule(name, level))
    asked(given)
    micro_batch = dict(given)  # a copy, as a user's loss may make
    asked.in_loss(given, logs(W))
    assert_close(micro_batch["importance_sampling_ratio"], torch.tensor(TABLE[name, level]), atol=2e-6, rtol=0)
    assert_close(given["advantages"], torch.tensor(ADVANTAGES[shape]))
    assert "old_per_token_logps" not in given, "TRL takes pi, which is pi_old in the first pass"


def test_with_several_steps_a_batch_the_weights_are_those_of_the_policy_before_them() -> None:
    given = batch(ADVANTAGES["[B]"]) | {"old_per_token_logps": logs(W)}
    asked = correction(rule("tis"))
    asked(given)
    asked.in_loss(given, logs([[9.0] * 4] * 2))
    assert_close(given["importance_sampling_ratio"], torch.tensor(TABLE["tis", "token"]), atol=2e-6, rtol=0)


def test_bypass_takes_the_samplers_log_probabilities_as_the_old_ones() -> None:
    given = batch(ADVANTAGES["[B]"]) | {"old_per_token_logps": logs(W)}
    correction(rule("bypass"))(given)
    mask = loss_mask(given)
    assert_close(given["old_per_token_logps"][mask], given["sampling_per_token_logps"][mask])
    assert "importance_sampling_ratio" not in given


def test_what_a_tool_wrote_makes_no_nan_whatever_a_rollout_func_says_of_it() -> None:
    """TRL multiplies the loss of each token by the mask: 0 times infinity."""
    given = batch(ADVANTAGES["[B]"])
    mask = loss_mask(given)
    given["sampling_per_token_logps"] = given["sampling_per_token_logps"].where(mask, -1e4)
    correction(rule("bypass"))(given)
    ratio = torch.exp(logs(W) - given["old_per_token_logps"])
    assert torch.isfinite((ratio * given["advantages"][:, None]) * mask).all()


@pytest.mark.parametrize("name", ["trl", "none"])
def test_trl_and_none_leave_the_batch_to_trl(name: str) -> None:
    given = batch(ADVANTAGES["[B]"])
    keys = set(given)
    correction(rule(name))(given)
    assert set(given) == keys


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 4), (2, 4, 1), ()])
def test_advantages_of_another_shape_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"`advantages` of shape .* for 2 completions of 4 tokens"):
        correction(rule(name))(batch(ADVANTAGES["[B]"]) | {"advantages": torch.zeros(shape)})
    check_shapes(batch([[1.0], [2.0]]))
    without = batch(ADVANTAGES["[B]"])
    del without["sampling_per_token_logps"]
    with pytest.raises(UnsupportedError, match=r"gave no `sampling_per_token_logps`. Return from _generate_and_score"):
        check_shapes(without)


# --- Metrics ----------------------------------------------------------------------------------------------


def test_limited_tokens_are_counted_for_short_and_long_completions_apart() -> None:
    metrics = Metrics()
    given = batch(ADVANTAGES["[B]"])
    asked = correction(rule("icepop"), metrics)
    asked(given)
    asked.in_loss(given, logs(W))
    # Of six tokens, 0.25 and 8 of the long completion are dropped; the two of the short one keep their weights.
    assert metrics["async/weight_dropped_fraction"] == [pytest.approx(2 / 6)]
    assert metrics["async/weight_dropped_fraction_long"] == [0.5]
    assert metrics["async/weight_changed_fraction_short"] == [0.0]


def test_clipped_tokens_are_counted_for_short_and_long_completions_apart() -> None:
    metrics = Metrics()
    given = batch(ADVANTAGES["[B]"]) | {"old_per_token_logps": torch.full((2, 4), LOG_MU)}
    correction(rule("bypass"), metrics).after_loss(given, logs(W), version=5)
    assert metrics["async/clip_fraction_long"] == [0.25], "A > 0: 8 is above 3; 0.25 is not clipped"
    assert metrics["async/clip_fraction_short"] == [0.5], "A < 0: 0.5 is below 0.8; 1.5 is not clipped"


def test_the_mismatch_is_of_groups_that_the_trainers_present_weights_sampled() -> None:
    """With several steps on a batch, the trainer has moved on after the first: then nothing is left to compare."""
    given = batch(ADVANTAGES["[B]"])
    for version, expected in ((5, [(abs(log(0.5)) + log(1.5)) / 2]), (6, None)):
        metrics = Metrics()
        correction(rule("bypass"), metrics).after_loss(given, logs(W), version=version)
        assert metrics.get("async/logprob_mismatch") == (expected and [pytest.approx(expected[0])])
        assert metrics["async/ratio_max"] == [pytest.approx(8.0)]


# --- Before a start ---------------------------------------------------------------------------------------


def trainer(**changes: Any) -> Any:
    of_vllm = {"correction": True, "mode": "sequence_mask", "clip_min": None, "clip_max": 3.0}
    args: dict[str, Any] = {f"vllm_importance_sampling_{name}": value for name, value in of_vllm.items()}
    args |= {"top_p": 1.0, "off_policy_mask_threshold": None, "loss_type": "dapo", **changes}
    wants_vllm = bool(args.pop("use_vllm", False))
    return SimpleNamespace(args=SimpleNamespace(**args), loss_type=args["loss_type"], async_grpo_wants_vllm=wants_vllm)


@pytest.mark.parametrize(
    ("chosen", "changes", "own_loss", "said"),
    [
        (rule("tis", "sequence"), {"loss_type": "vespo"}, False, "Take --correction-level token"),
        (rule("trl"), {"loss_type": "vespo"}, False, "vllm_importance_sampling_mode 'token_truncate'"),
        (rule("trl"), {}, True, "has a loss of its own that does not call TRL's"),
        (rule("tis"), {"off_policy_mask_threshold": 0.5}, True, "off_policy_mask_threshold masks whole sequences"),
    ],
)
def test_what_is_refused(chosen: Rule, changes: Any, own_loss: bool, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        check(chosen, trainer(**changes), own_loss=own_loss)
    check(rule("bypass"), trainer(**changes), own_loss=own_loss)


def test_what_the_loss_is_in_words() -> None:
    def told(name: str, staleness: int = 4, *, own_loss: bool = False, **changes: Any) -> str:
        return describe(rule(name), trainer(**changes), max_staleness=staleness, own_loss=own_loss)

    assert told("bypass", 0) == told("trl", use_vllm=True) == told("none") == ""
    assert "clips the ratio to the policy that sampled (bypass)" in told("bypass")
    vllm = told("bypass", 0, use_vllm=True)
    assert "not TRL's of use_vllm=True" in vllm and "--correction trl does what TRL does" in vllm
    assert "vllm_importance_sampling_mode='sequence_mask', vllm_importance_sampling_clip_max=3" in vllm
    assert "(vllm_importance_sampling_correction=False)" in told(
        "bypass", use_vllm=True, vllm_importance_sampling_correction=False
    )
    assert "does not ask for vLLM" in told("trl")
    assert "drops it outside 0.5 to 5 (icepop)" in told("icepop")
    assert "must take that shape" in told("icepop", own_loss=True)
