"""The effective sample size of sequences against a table made by hand, over micro-batches and ranks."""

from __future__ import annotations

import json
import os
import sys
from math import exp, log
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.training.corrections.metrics import EffectiveShare, effective_share, log_ratios, sums_of

DEADLINE_S = 120

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


RANK = """
import json, sys, torch
from torch import distributed
from async_grpo.training.corrections.metrics import EffectiveShare
rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
def gather(own):
    parts = [torch.empty_like(own) for _ in range(ranks)]
    distributed.all_gather(parts, own)
    return torch.cat(parts)
metrics = {}
share = EffectiveShare(gather, metrics.__setitem__)
torch.manual_seed(0)
log_pi, log_mu = torch.randn(2, 16, 6)
mask = torch.rand(16, 6) < 0.8
own = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
for part in (slice(None, None, 2), slice(1, None, 2)):  # two micro-batches
    inputs = {"completion_mask": mask[own][part].int(), "sampling_per_token_logps": log_mu[own][part]}
    share.saw(inputs, log_pi[own][part])
share.on_pre_optimizer_step()
print(json.dumps(metrics["async/ess_sequences"]))
distributed.destroy_process_group()  # else a thread of gloo may abort the exit
"""


def shares(ranks: int, folder: Path) -> list[float]:
    """What each of so many gloo ranks reports."""
    env, command = {**os.environ, "OMP_NUM_THREADS": "1"}, [sys.executable, "-c", RANK]
    arguments = [[str(rank), str(ranks), str(folder / "store")] for rank in range(ranks)]
    processes = [Popen([*command, *each], stdout=PIPE, env=env) for each in arguments]
    return [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]


def by_hand() -> float:
    """The share over the sequences of `RANK`, in plain Python."""
    torch.manual_seed(0)
    log_pi, log_mu = torch.randn(2, 16, 6).tolist()
    mask = (torch.rand(16, 6) < 0.8).tolist()
    rows = [
        [pi - mu for pi, mu, counted in zip(*row, strict=True) if counted]
        for row in zip(log_pi, log_mu, mask, strict=True)
    ]
    weights = [exp(sum(row)) for row in rows if row]
    return sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_share_of_several_ranks_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    assert shares(ranks, tmp_path) == pytest.approx([by_hand()] * ranks, abs=1e-6)
