"""`--train-of-group`: which completions are kept, by a table made by hand and against every subset; what is left."""

from __future__ import annotations

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_grpo.errors import UnsupportedError
from async_grpo.training.train_of_group import most_different, part_of_groups

TABLE: list[tuple[list[float], int, list[int]]] = [
    ([0, 0, 0, 1, 0, 0], 2, [3, 5]),  # 0 and 1 are the highest two, too, and of equal ones the last is the highest
    ([1, 1, 0, 1, 1, 1], 4, [2, 3, 4, 5]),
    ([0, 1, 0, 1, 0, 1], 4, [0, 2, 3, 5]),
    ([0, 1, 2, 9, 10, 3], 3, [0, 3, 4]),  # as good as 0, 1 and 10: the fewest of the lowest
    ([-3, 5, 0, 4, -2, 1], 4, [0, 1, 3, 4]),
    ([7, 7, 7, 7], 2, [2, 3]),  # of equal rewards any are as good
]


@pytest.mark.parametrize(("rewards", "count", "kept"), TABLE)
def test_the_table(rewards: list[float], count: int, kept: list[int]) -> None:
    assert most_different(torch.tensor([rewards]), count).tolist() == [kept]
    scaled = (torch.tensor([rewards]) - 3.7) / 1.9  # as advantages are
    assert most_different(scaled, count).tolist() == [kept]


@pytest.mark.parametrize("values", ["normal", "few"])
def test_no_subset_has_a_larger_variance(values: str) -> None:
    torch.manual_seed(0)
    rewards = torch.randn(40, 9) if values == "normal" else torch.randint(3, (40, 9)).float()
    for count in range(2, 9):
        kept = most_different(rewards, count)
        assert kept.shape == (40, count) and (kept.diff(dim=1) > 0).all()
        subsets = torch.tensor(list(combinations(range(9), count)))
        most = rewards.double()[:, subsets].var(-1, correction=0).amax(1)
        torch.testing.assert_close(rewards.double().gather(1, kept).var(-1, correction=0), most)


def test_rounding_decides_nothing() -> None:
    """One of the lowest with two of the highest, or two with one: the same variance."""
    rewards = torch.tensor([[0.1, 0.1, 0.4, 0.7, 0.7]])
    assert most_different(rewards, 3).tolist() == most_different(rewards + 1e3, 3).tolist() == [[0, 3, 4]]


def trainer(count: int, others: int = 0) -> Any:
    """One of groups of four, beside another rank with so many tokens."""
    gathered = lambda own: torch.stack([own, torch.tensor(others)])  # noqa: E731
    return SimpleNamespace(num_generations=4, train_of_group=count, accelerator=SimpleNamespace(gather=gathered))


def batch() -> dict[str, Any]:
    """Two groups of four; completion i has i + 1 tokens, of which a tool wrote the first of the last group's."""
    mask = (torch.arange(8)[None] <= torch.arange(8)[:, None]).long()
    tools = torch.ones_like(mask)
    tools[4:, 0] = 0
    return {
        "completion_ids": torch.arange(8)[:, None].expand(8, 8),
        "completion_mask": mask,
        "tool_mask": tools,
        "advantages": torch.tensor([-0.5, 1.5, -0.5, -0.5, 0.1, 0.9, -0.8, -0.2]),
        "num_items_in_batch": torch.tensor(32),
        "old_per_token_logps": None,
        "num_images": [1, 0, 2, 0, 0, 1, 1, 0],
        "image_grid_thw": torch.tensor([[1, 1, 2], [1, 1, 1], [1, 1, 1], [1, 1, 3], [1, 1, 1]]),
        "pixel_values": torch.tensor([[0.0], [0.1], [2.0], [2.5], [5.0], [5.1], [5.2], [6.0]]),
    }


def test_a_batch_keeps_the_rows_with_their_advantages_of_all_and_their_images() -> None:
    part = part_of_groups(trainer(2, others=100), batch(), rows=8)
    kept = [1, 3, 5, 6]
    assert part["completion_ids"][:, 0].tolist() == kept
    assert part["advantages"].tolist() == pytest.approx([1.5, -0.5, 0.9, -0.8])
    assert part["num_items_in_batch"] == (2 + 4) + (6 - 1 + 7 - 1) + 100, "tokens of the loss, of all ranks"
    assert part["old_per_token_logps"] is None
    assert part["num_images"] == [0, 0, 1, 1]
    assert part["pixel_values"].flatten().tolist() == pytest.approx([5.0, 5.1, 5.2, 6.0])
    assert part["image_grid_thw"].tolist() == [[1, 1, 3], [1, 1, 1]]


def test_advantages_of_tokens_and_other_rows_are_refused() -> None:
    of_tokens = batch() | {"advantages": torch.zeros(8, 8)}
    with pytest.raises(UnsupportedError, match=r"one advantage for each of 8 completions, .* of shape \[8, 8\]"):
        part_of_groups(trainer(2), of_tokens, rows=8)
    with pytest.raises(UnsupportedError, match=r"of shape \[8\]. Leave the option out"):
        part_of_groups(trainer(2), batch(), rows=16)
