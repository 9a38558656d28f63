"""What a model computes images from, of the rows of a batch that it is asked about."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_grpo.engines import PreparedGroup
from async_grpo.engines.vision import VisionInputs
from kit.engines import job

CPU = torch.device("cpu")


def group(seq: int, prompts: list[list[int]], *fields: dict[str, Any]) -> PreparedGroup:
    return PreparedGroup(job=job(seq), version=0, prompt_ids=prompts, fields=fields)


def image(value: float, width: int = 2) -> torch.Tensor:
    return torch.full((1, width), value)


ONE = {"pixel_values": image(1), "sizes": torch.tensor([[4, 4]]), "token_type_ids": [[0, 1, 1]]}
OTHER = {
    "pixel_values": torch.cat([image(2), image(3)]),
    "sizes": torch.tensor([[4, 4], [8, 4]]),
    "token_type_ids": [[1]],
}


def test_rows_are_put_together_and_padded_on_the_left() -> None:
    vision = VisionInputs([group(0, [[1, 2, 3]] * 2, ONE, ONE), group(1, [[4]] * 2), group(2, [[5]], OTHER)], 4, CPU)
    assert vision.keys_B.tolist()[0] == vision.keys_B.tolist()[1]
    assert len(set(vision.keys_B.tolist())) >= 3
    everything = vision.of_rows()
    assert everything["pixel_values"][:, 0].tolist() == [1, 1, 2, 3]
    assert everything["token_type_ids"].tolist() == [[0, 0, 1, 1]] * 2 + [[0, 0, 0, 0]] * 2 + [[0, 0, 0, 1]]
    some = vision.of_rows(torch.tensor([0, 4]), more_tokens=1)
    assert some["sizes"].tolist() == [[4, 4], [4, 4], [8, 4]]
    assert some["token_type_ids"].tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 0]]
    assert vision.small().keys() == {"sizes", "token_type_ids"}, "pixels are for forward passes only"


def test_a_turn_of_several_prompts_is_taken_whole() -> None:
    turn = {"pixel_values": torch.cat([image(1), image(2)]), "token_type_ids": [[1], [1, 0]]}
    vision = VisionInputs([group(0, [[1], [2, 3]], turn)], 2, CPU)
    assert not vision.selectable
    assert vision.of_rows()["token_type_ids"].tolist() == [[0, 1], [1, 0]]


def test_images_that_do_not_fit_together_are_an_error_of_the_batch() -> None:
    """The engine then samples each group alone."""
    with pytest.raises(RuntimeError):
        VisionInputs([group(0, [[1]], {"x": image(1)}), group(1, [[1]], {"x": image(1, 3)})], 1, CPU).small()
