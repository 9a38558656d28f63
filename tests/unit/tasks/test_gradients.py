"""The gradients of tasks: their shares, and what PCGrad makes of them, against the paper's algorithm on vectors."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo.tasks.gradients import TASK, WEIGHTINGS, dealt, require_shares, shares, task_weights


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """What one process gathers."""
    return tensor


def batch(tasks: list[int], tokens: int = 3) -> dict[str, Any]:
    rows = len(tasks)
    mask = (torch.arange(tokens) < torch.arange(1, rows + 1)[:, None]).long()
    return {
        "completion_ids": torch.arange(rows * tokens).view(rows, tokens),
        "completion_mask": mask,
        TASK: torch.tensor(tasks),
        "names": [str(row) for row in range(rows)],
        "num_items_in_batch": mask.sum(),
        "nothing": None,
    }


@pytest.mark.parametrize(("loss_type", "factors"), [("dapo", [1, 1]), ("grpo", [0.75, 0.25]), ("bnpo", [7 / 9, 2 / 9])])
def test_the_rows_of_each_task_and_the_factor_of_their_loss(loss_type: str, factors: list[float]) -> None:
    parts = list(shares(batch([0, 2, 0, 0]), 3, loss_type, alone))
    assert [task for task, _, _ in parts] == [0, 2]
    assert [part["names"] for _, part, _ in parts] == [["0", "2", "3"], ["1"]]
    assert [factor for _, _, factor in parts] == pytest.approx(factors)
    assert parts[1][1]["completion_ids"].tolist() == [[3, 4, 5]]
    assert parts[0][1]["num_items_in_batch"] == 9 and parts[0][1]["nothing"] is None


def test_processes_with_other_rows_compute_all_rows_masked() -> None:
    """Task 1 is another process's alone: this one computes its loss too, of nothing."""

    def with_another(own: torch.Tensor) -> torch.Tensor:
        return torch.cat([own, torch.tensor([1, 2])])

    parts = list(shares(batch([0, 0, 0]), 2, "grpo", with_another))
    counted = [(task, factor, int(part["completion_mask"].sum())) for task, part, factor in parts]
    assert counted == [(0, 1.0, 6), (1, 1.0, 0)]


def test_each_micro_batch_gets_its_share_of_each_task() -> None:
    one = batch([0, 0, 1, 0, 2, 1, 0, 0])
    parts = dealt([{n: v[:4] if n not in ("num_items_in_batch", "nothing") else v for n, v in one.items()}] * 2)
    assert [part[TASK].tolist() for part in parts] == [[0, 0, 0, 1], [0, 0, 0, 1]]
    assert [len(part["names"]) for part in parts] == [4, 4]


def projected(gradients: list[torch.Tensor], orders: list[tuple[int, ...]]) -> torch.Tensor:
    """Algorithm 1 of the paper, on the vectors, with one order for each task; the sum of what is left of each."""
    found = []
    for one, order in enumerate(orders):
        left = gradients[one].clone()
        for other in order:
            dot = left @ gradients[other]
            if other != one and dot < 0:
                left -= dot / (gradients[other] @ gradients[other]) * gradients[other]
        found.append(left)
    return torch.stack(found).sum(dim=0)


def combined(gradients: list[torch.Tensor], seed: int = 0, method: str = "pcgrad") -> torch.Tensor:
    stacked = torch.stack(gradients)
    return task_weights(method, stacked @ stacked.T, seed) @ stacked


def test_two_tasks_are_the_closed_form() -> None:
    one, two = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([-2.0, 0.5, 0.5]).double()
    dot = one @ two
    assert dot < 0
    right = one - dot / (two @ two) * two + two - dot / (one @ one) * one
    assert torch.allclose(combined([one, two]), right, atol=1e-12)
    assert torch.allclose(combined([one, -2 * two]), one - 2 * two, atol=1e-12)  # no conflict


def test_three_tasks_are_the_mean_over_all_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    gradients = [torch.randn(4, dtype=torch.float64) for _ in range(3)]
    gradients[1] -= 2 * gradients[0]
    orders = list(permutations(range(3)))
    expected = torch.stack([projected(gradients, [order] * 3) for order in orders]).mean(dim=0)
    got = []
    for order in orders:
        monkeypatch.setattr(torch, "randperm", lambda _, order=order: torch.tensor(order))
        got.append(combined(gradients))
    assert torch.allclose(torch.stack(got).mean(dim=0), expected, atol=1e-12)
    assert not torch.allclose(got[0], got[-1], atol=1e-6), "the order matters here"


@pytest.mark.parametrize("method", WEIGHTINGS)
def test_orthogonal_gradients_stay_and_what_is_zero_is_left_out(method: str) -> None:
    one, two, none = torch.eye(3, dtype=torch.float64)[0], torch.eye(3, dtype=torch.float64)[1], torch.zeros(3)
    assert combined([one, none.double(), two], method=method).tolist() == pytest.approx([1, 1, 0], abs=1e-6)
    assert combined([none.double()] * 2, method=method).tolist() == [0, 0, 0]


def test_each_method_does_with_two_gradients_what_its_paper_says() -> None:
    """The nearest point to 0 between them; equal projections on both; no direction stronger than the weakest."""
    one, two = torch.tensor([1.0, 0.0]).double(), torch.tensor([-1.0, 2.0]).double()
    assert combined([one, two], method="mgda").tolist() == pytest.approx([1, 1], abs=1e-6)  # twice that point
    projections = [float(combined([one, two], method="imtl_g") @ it / it.norm()) for it in (one, two)]
    assert projections[0] == pytest.approx(projections[1])
    weakest = float(torch.linalg.svdvals(torch.stack([one, two]))[-1])
    assert float(combined([one, two], method="aligned_mtl").norm()) == pytest.approx(weakest * 2**0.5)


def test_the_order_is_of_the_seed_and_draws_nothing_of_the_run() -> None:
    torch.manual_seed(1)
    gradients = [torch.randn(4, dtype=torch.float64) for _ in range(5)]
    gradients[1] -= 2 * gradients[0]
    before = torch.get_rng_state()
    found = [combined(gradients, seed) for seed in (7, 7, 8)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert torch.equal(torch.get_rng_state(), before)


def trainer(**changes: Any) -> Any:
    args = {"entropy_coef": 0.0, "top_entropy_quantile": 1.0, **changes}
    return SimpleNamespace(is_deepspeed_enabled=args.pop("deepspeed", False), args=SimpleNamespace(**args))


@pytest.mark.parametrize("change", [{"deepspeed": True}, {"entropy_coef": 0.1}, {"top_entropy_quantile": 0.2}], ids=str)
def test_what_has_no_shares_is_refused(change: dict[str, Any]) -> None:
    require_shares(trainer(), "pcgrad")
    with pytest.raises(UsageError, match='mtl="pcgrad"'):
        require_shares(trainer(**change), "pcgrad")
