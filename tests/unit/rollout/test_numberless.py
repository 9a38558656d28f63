"""Reward functions that give nothing but NaN: one warning for each."""

from __future__ import annotations

import torch

from async_grpo.rollout.held_data import PATIENCE, Numberless

NAN = float("nan")


def test_a_function_that_is_the_only_one_is_warned_of_at_once_and_once(warnings: list[str]) -> None:
    numberless = Numberless()
    for _ in range(PATIENCE + 1):
        numberless.saw(["right"], torch.tensor([[NAN], [NAN]]), groups=1)
    assert len(warnings) == 1
    assert "the reward function right gave no number, only NaN or None, for any of 2 completions" in warnings[0]
    assert "nothing is learnt from them" in warnings[0]


def test_each_function_has_its_own_warning_when_some_groups_had_none_of_it(warnings: list[str]) -> None:
    numberless = Numberless()
    for seq in range(PATIENCE):
        assert len(warnings) == 0, f"before group {seq}"
        numberless.saw(["right", "form", "form"], torch.tensor([[NAN, 1.0, NAN]]), groups=1)
    assert [line.partition(" gave")[0].split(maxsplit=3)[3] for line in warnings] == ["right", "form (2)"]
    assert f"any of {PATIENCE} completions so far: it has no part in the reward" in warnings[0]


def test_a_function_that_is_for_some_rows_only_is_not_warned_of(warnings: list[str]) -> None:
    numberless = Numberless()
    numberless.saw(["sums", "words"], torch.tensor([[NAN, 1.0]]), groups=1)
    numberless.saw(["sums", "words"], torch.tensor([[0.5, NAN]]), groups=1)
    for _ in range(PATIENCE):
        numberless.saw(["sums", "words"], torch.tensor([[NAN, 1.0]]), groups=1)
    assert warnings == []
