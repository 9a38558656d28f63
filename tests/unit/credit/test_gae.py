"""The formulas of PPO, against a table made by hand and against numbers of verl 0.9.1 (`scripts/verl_table.py`)."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from statistics import mean, variance
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.credit import gae

VERL: dict[str, Any] = json.loads((Path(__file__).parent / "verl_0_9_1.json").read_text())

# Three turns of 2, 1 and 2 tokens, with 1 and 2 tokens of a tool between them; and one turn, padded. 9 is not read.
MASKS = [[1, 1, 0, 1, 0, 0, 1, 1], [1, 1]]
MASK = [[1, 1, 0, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]]
TURNS = [[1.0, -0.5, 0.25], [nan]]
OUTCOMES = [2.0, -1.0]
REWARDS = [[0, 1.0, 0, -0.5, 0, 0, 0, 2.25], [0, -1.0, 0, 0, 0, 0, 0, 0]]
VALUES = [[0.1, 0.2, 9, 0.3, 9, 9, 0.4, 0.5], [-0.2, 0.6, 9, 9, 9, 9, 9, 9]]
GAMMA, LAM = 0.9, 0.8

# By hand, from the last token to the first: d = r + 0.9 V' - V, A = d + 0.72 A'.
#   row 1: d = 1.75, 0.05, -0.44, 1.07, 0.08
#   row 2: d = -1.6, 0.74
ADVANTAGES = [[1.11125888, 1.432304, 0, 0.5032, 0, 0, 1.31, 1.75], [-0.412, -1.6, 0, 0, 0, 0, 0, 0]]


def exact(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(found: Tensor, right: Any) -> bool:
    return torch.allclose(found.double(), exact(right), rtol=0, atol=1e-6)


def alone(values: Tensor) -> Tensor:
    """The values of all processes, where there is one."""
    return values


def test_rewards_are_at_the_ends_of_turns() -> None:
    assert gae.rewards_of_tokens(exact(OUTCOMES), TURNS, MASKS, 8).tolist() == REWARDS
    assert gae.rewards_of_tokens(exact([nan]), [[nan]], [[1]], 2).tolist() == [[0, 0]], "no reward is none"


@pytest.mark.parametrize(
    ("mask", "turns", "right"),
    [
        ([1, 1, 0, 0], [3.0], [0, 10.0, 0, 0]),  # the text after a tool's result was cut to nothing
        ([0, 0, 0, 0], [], [0, 0, 0, 0]),  # nothing was written
        ([1, 0, 1, 1], [nan, nan], [0, 0, 0, 7.0]),
    ],
)
def test_the_outcome_is_at_the_last_token_that_the_policy_wrote(
    mask: list[int], turns: list[float], right: list[float]
) -> None:
    assert gae.rewards_of_tokens(exact([7.0]), [turns], [mask], 4).tolist() == [right]


def test_tokens_of_tools_count_for_nothing() -> None:
    """The same without them, whatever their values and rewards are."""
    wild = exact(VALUES).masked_fill(exact(MASK) == 0, -1e6)
    rewards = exact(REWARDS).masked_fill(exact(MASK) == 0, 1e6)
    advantages, _ = gae.gae(rewards, wild, exact(MASK), gamma=GAMMA, lam=LAM)
    written = exact(MASK)[0].bool()
    given = (exact([row])[:, written] for row in (REWARDS[0], VALUES[0]))
    short, _ = gae.gae(*given, torch.ones(1, 5), gamma=GAMMA, lam=LAM)
    assert same(advantages, ADVANTAGES)
    assert same(short, exact([ADVANTAGES[0]])[:, written].tolist())


def test_whitening() -> None:
    known = [it for row, mask in zip(ADVANTAGES, MASK, strict=True) for it, mine in zip(row, mask, strict=True) if mine]
    right = (exact(ADVANTAGES) - mean(known)) / (variance(known) + 1e-8) ** 0.5 * exact(MASK)
    assert same(gae.whitened(exact(ADVANTAGES), exact(MASK), alone), right.tolist())
    assert gae.whitened(exact([[3.0, 5.0]]), exact([[1, 0]]), alone).tolist() == [[0, 0]], "one token has no spread"


def test_whitening_is_over_all_processes() -> None:
    both, mask = exact(ADVANTAGES), exact(MASK)
    known = both[mask.bool()]
    of_ranks = [gae.whitened(both[rank : rank + 1], mask[rank : rank + 1], lambda own: known) for rank in (0, 1)]
    assert same(torch.cat(of_ranks), gae.whitened(both, mask, alone).tolist())


def test_value_loss() -> None:
    """One within the range, one beyond it on the far side of the return, and one that has moved towards it."""
    losses, clipped = gae.value_losses(exact([1.2, 2.0, 2.0]), exact([1.0, 1.0, 1.0]), exact([1.0, 1.0, 4.0]), clip=0.5)
    assert same(losses, [0.02, 0.5, 3.125])
    assert clipped.tolist() == [False, False, True]


def test_explained_variance() -> None:
    returns = exact([0.0, 1.0, 2.0, 3.0])
    assert gae.explained_variance(returns, returns) == 1.0
    assert gae.explained_variance(torch.zeros(4), returns) == pytest.approx(0.0, abs=1e-4)
    assert gae.explained_variance(-returns, returns) < 0


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        ("kl", [0.5, -0.5, -30.0]),
        ("abs", [0.5, 0.5, 30.0]),
        ("mse", [0.125, 0.125, 450.0]),
        ("low_var_kl", [0.1065306597, 0.1487212707, 10.0]),  # exp(∓0.5) ± 0.5 - 1; at most 10
    ],
)
def test_estimators_of_kl(kind: str, right: list[float]) -> None:
    assert same(gae.kl_penalties(exact([-1.0, -1.5, -31.0]), exact([-1.5, -1.0, -1.0]), kind), right)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="kl_penalty must be one of kl, abs, mse, low_var_kl, got 'full'"):
        gae.kl_penalties(exact([0.0]), exact([0.0]), "full")


# --- verl -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given() -> dict[str, Tensor]:
    return {name: exact(rows) for name, rows in VERL["inputs"].items()}


def test_advantages_are_verls(given: dict[str, Tensor]) -> None:
    rewards, values, mask = given["rewards"], given["values"], given["mask"]
    advantages, returns = gae.gae(rewards, values, mask, gamma=VERL["gamma"], lam=VERL["lam"])
    assert same(returns, VERL["returns"])
    assert same(gae.whitened(advantages, mask, alone), VERL["advantages"])


def test_value_loss_is_verls(given: dict[str, Tensor]) -> None:
    mask = given["mask"]
    losses, clipped = gae.value_losses(given["new_values"], given["values"], exact(VERL["returns"]), clip=0.5)
    assert float((losses * mask).sum() / mask.sum()) == pytest.approx(VERL["value_loss"], abs=1e-6)
    assert float((clipped * mask).sum() / mask.sum()) == pytest.approx(VERL["value_clipfrac"], abs=1e-6)


@pytest.mark.parametrize("kind", VERL["kl"])
def test_estimators_of_kl_are_verls(kind: str, given: dict[str, Tensor]) -> None:
    assert same(gae.kl_penalties(given["logprobs"], given["reference"], kind), VERL["kl"][kind])


@pytest.mark.parametrize(("coefficient", "kl", "completions", "right"), VERL["controller"])
def test_the_controller_is_verls(coefficient: float, kl: float, completions: int, right: float) -> None:
    found = gae.adapted(coefficient, kl, target=0.1, horizon=10000, completions=completions)
    assert found == pytest.approx(right, rel=1e-9)
