"""`--step-scaling`: the scale against a table made by hand, over micro-batches and ranks; and whom it touches."""

from __future__ import annotations

import json
import os
import sys
from math import exp, log, sqrt
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.errors import UnsupportedError
from async_grpo.training.corrections.step_scaling import (
    StepScaling,
    effective_share,
    log_ratios,
    sums_of,
)

DEADLINE_S = 120

# Four completions of three tokens. Of the second one token is padding and one a tool's, and of the third the loss
# counts nothing.
W = [[2.0, 0.5, 3.0], [0.5, 7.0, 9.0], [4.0, 4.0, 4.0], [1.0, 2.0, 0.25]]
COMPLETION_MASK = [[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]
TOOL_MASK = [[1, 1, 1], [1, 0, 1], [1, 1, 1], [1, 1, 1]]

# By hand. Sequences: w = 3, 0.5, 0.5, so ESS = 4^2 / (9 + 0.25 + 0.25) = 16 / 9.5, of 3. Tokens: w = 2, 0.5, 3, 0.5, 1,
# 2, 0.25, so ESS = 9.25^2 / (4 + 0.25 + 9 + 0.25 + 1 + 4 + 0.0625) = 85.5625 / 18.5625, of 7.
TABLE = {"sequences": 16 / 9.5 / 3, "tokens": 85.5625 / 18.5625 / 7}

LOG_MU = -1.0


def batch(rows: slice = slice(None)) -> tuple[dict[str, Tensor], Tensor]:
    """The inputs of a loss, and its log-probabilities."""
    inputs = {
        "completion_mask": torch.tensor(COMPLETION_MASK)[rows],
        "tool_mask": torch.tensor(TOOL_MASK)[rows],
        "sampling_per_token_logps": torch.full((4, 3), LOG_MU)[rows],
    }
    return inputs, torch.tensor([[LOG_MU + log(w) for w in row] for row in W])[rows]


class Metrics(dict[str, float]):
    def append(self, name: str, value: float) -> None:
        self[name] = value


def scaling(unit: str, metrics: Metrics | None = None) -> StepScaling:
    return StepScaling(unit, lambda own: own, (Metrics() if metrics is None else metrics).append)


def sgd(rate: Any = 0.1) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    return torch.optim.SGD([{"params": [parameters[0]], "lr": rate}, {"params": [parameters[1]], "lr": 2 * rate}])


@pytest.mark.parametrize("unit", TABLE)
@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(0, 1), slice(1, 3), slice(3, 4)]], ids=["one", "three"])
def test_the_share_of_one_and_of_three_micro_batches_is_that_of_the_table(unit: str, parts: list[slice]) -> None:
    metrics = Metrics()
    scaled = scaling(unit, metrics)
    for part in parts:
        scaled.saw(*batch(part))
    scaled.on_pre_optimizer_step(optimizer=sgd())
    assert metrics[f"async/ess_{unit}"] == pytest.approx(TABLE[unit], abs=1e-6)
    assert metrics["async/rate_scale"] == pytest.approx(sqrt(TABLE[unit]), abs=1e-6)


def test_each_rate_is_scaled_for_the_step_alone_and_the_schedulers_stays() -> None:
    optimizer, scaled = sgd(), scaling("sequences")
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=10)
    for step in range(2):
        rates = [group["lr"] for group in optimizer.param_groups]
        before = [group["params"][0].item() for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(1)
        scaled.saw(*batch())
        scaled.on_pre_optimizer_step(optimizer=optimizer)
        optimizer.step()
        scaled.on_optimizer_step(optimizer=optimizer)
        moved = [old - group["params"][0].item() for old, group in zip(before, optimizer.param_groups, strict=True)]
        assert moved == pytest.approx([rate * sqrt(TABLE["sequences"]) for rate in rates], abs=1e-6)
        assert [group["lr"] for group in optimizer.param_groups] == rates
        scheduler.step()
        assert scheduler.get_last_lr() == pytest.approx([0.1 * (0.9 - 0.1 * step), 0.2 * (0.9 - 0.1 * step)])


def test_a_rate_that_is_a_tensor_is_the_same_tensor_afterwards() -> None:
    optimizer, scaled = sgd(torch.tensor(0.1)), scaling("tokens")
    rate = optimizer.param_groups[0]["lr"]
    scaled.saw(*batch())
    scaled.on_pre_optimizer_step(optimizer=optimizer)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 * sqrt(TABLE["tokens"]))
    scaled.on_optimizer_step(optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit"])
def test_8_bit_and_paged_optimizers_take_the_scaled_rate(name: str) -> None:
    """Adam's first step is as long as the rate, whatever the gradient."""
    optim = pytest.importorskip("bitsandbytes").optim
    weight = torch.nn.Parameter(torch.zeros(8192))
    optimizer, scaled = getattr(optim, name)([weight], lr=0.1, weight_decay=0.0), scaling("sequences")
    weight.grad = torch.ones_like(weight)
    scaled.saw(*batch())
    scaled.on_pre_optimizer_step(optimizer=optimizer)
    optimizer.step()
    scaled.on_optimizer_step(optimizer=optimizer)
    assert -weight.mean().item() == pytest.approx(0.1 * sqrt(TABLE["sequences"]), rel=1e-3)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_without_scaling_the_share_is_reported_and_the_rate_is_left_alone() -> None:
    metrics, optimizer = Metrics(), sgd()
    watching = StepScaling("sequences", lambda own: own, metrics.append, scales=False)
    watching.on_pre_optimizer_step(optimizer=optimizer)
    assert metrics == {}, "a loss without log-probabilities"
    watching.saw(*batch())
    watching.on_pre_optimizer_step(optimizer=optimizer)
    assert metrics == {"async/ess_sequences": pytest.approx(TABLE["sequences"], abs=1e-6)}
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    watching.on_optimizer_step(optimizer=optimizer)


def test_each_step_has_its_own_share() -> None:
    metrics = Metrics()
    scaled, optimizer = scaling("sequences", metrics), sgd()
    for rows, expected in ((slice(0, 4), TABLE["sequences"]), (slice(0, 1), 1.0), (slice(2, 3), 1.0)):
        scaled.saw(*batch(rows))
        scaled.on_pre_optimizer_step(optimizer=optimizer)
        scaled.on_optimizer_step(optimizer=optimizer)
        assert metrics["async/ess_sequences"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("log_pi", "log_mu", "expected"),
    [
        ([[0.0] * 3] * 4, [[0.0] * 3] * 4, 1.0),
        ([[900.0] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3], [[0.0] * 3] * 4, 1 / 3),  # one sequence outweighs all
        (
            [[-900.0] * 3, [-1350.0] * 3, [0.0] * 3, [-900.0] * 3],
            [[0.0] * 3] * 4,
            1.0,
        ),  # equally unlikely: equally heavy
        ([[0.0] * 3] * 4, [[float("-inf")] * 3, [0.0] * 3, [0.0] * 3, [0.0] * 3], 1 / 3),
        ([[float("nan")] * 3] * 4, [[0.0] * 3] * 4, 1.0),
    ],
)
def test_no_ratio_is_too_large_to_be_computed(log_pi: Any, log_mu: Any, expected: float) -> None:
    mask = torch.tensor(COMPLETION_MASK).bool()
    logs = log_ratios(torch.tensor(log_pi), torch.tensor(log_mu), mask, "sequences")
    assert effective_share(sums_of(logs)[None]) == pytest.approx(expected, abs=1e-9)


def test_a_loss_that_shows_no_log_probabilities_is_refused_at_its_first_step() -> None:
    with pytest.raises(UnsupportedError, match="Leave --step-scaling out"):
        scaling("sequences").on_pre_optimizer_step(optimizer=sgd())


RANK = """
import json, sys, torch
from torch import distributed
from async_grpo.training.corrections.step_scaling import StepScaling
rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
def gather(own):
    parts = [torch.empty_like(own) for _ in range(ranks)]
    distributed.all_gather(parts, own)
    return torch.cat(parts)
metrics = {}
scaling = StepScaling("sequences", gather, metrics.__setitem__)
torch.manual_seed(0)
log_pi, log_mu = torch.randn(2, 16, 6)
mask = torch.rand(16, 6) < 0.8
own = slice(rank * 16 // ranks, (rank + 1) * 16 // ranks)
for part in (slice(None, None, 2), slice(1, None, 2)):  # two micro-batches
    inputs = {"completion_mask": mask[own][part].int(), "sampling_per_token_logps": log_mu[own][part]}
    scaling.saw(inputs, log_pi[own][part])
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
scaling.on_pre_optimizer_step(optimizer=optimizer)
print(json.dumps(optimizer.param_groups[0]["lr"]))
distributed.destroy_process_group()  # else a thread of gloo may abort the exit
"""


def scales(ranks: int, folder: Path) -> list[float]:
    """What each of so many gloo ranks scales by."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [str(ranks), str(folder / "store")]
    processes = [
        Popen([sys.executable, "-c", RANK, str(rank), *arguments], stdout=PIPE, env=env) for rank in range(ranks)
    ]
    return [json.loads(process.communicate(timeout=DEADLINE_S)[0]) for process in processes]


def by_hand() -> float:
    """The scale over the sequences of `RANK`, in plain Python."""
    torch.manual_seed(0)
    log_pi, log_mu = torch.randn(2, 16, 6).tolist()
    mask = (torch.rand(16, 6) < 0.8).tolist()
    rows = [
        [pi - mu for pi, mu, counted in zip(*row, strict=True) if counted]
        for row in zip(log_pi, log_mu, mask, strict=True)
    ]
    weights = [exp(sum(row)) for row in rows if row]
    return sqrt(sum(weights) ** 2 / sum(w * w for w in weights) / len(weights))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_scale_of_several_ranks_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    assert scales(ranks, tmp_path) == pytest.approx([by_hand()] * ranks, abs=1e-6)
