"""What tokens are drawn by, and by which passes, on a device and in a deterministic run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_grpo.engines import drawing, transformers
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.trl_trainer import RolloutTrainer
from kit.tiny_trainer import build_trainer


def draw(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    sampled_b = scores_bV.softmax(-1).multinomial(1)[:, 0]
    return sampled_b, (logits_bV / temperature).log_softmax(-1).gather(1, sampled_b[:, None])[:, 0]


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (draw, None),
        (lambda logits, scores, temperature: draw(logits, logits, temperature), "samples what is ruled out"),
        (lambda logits, scores, temperature: draw(logits, scores, 1.0), "log-probabilities that are"),
    ],
)
def test_a_kernel_is_tried_before_it_is_taken(kernel: Any, reason: str | None) -> None:
    refused = drawing._wrong(kernel, torch.device("cpu"))
    assert refused is None if reason is None else refused is not None and reason in refused


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel runs here")
def test_without_the_kernel_tokens_are_drawn_as_before_and_the_log_says_why(messages: list[str]) -> None:
    assert drawing.drawn_on(torch.device("cuda")) is None
    assert "tokens are sampled by several kernels, not by the one that reads the logits once: " in "\n".join(messages)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_keeps_the_loop_whose_tokens_depend_on_no_neighbour(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    trl = RolloutTrainer(build_trainer(tmp_path))
    monkeypatch.setattr(transformers, "TransformersEngine", lambda model, **given: made.update(given))
    monkeypatch.setattr(type(trl.trainer.accelerator), "device", torch.device("cuda"))
    monkeypatch.setattr(drawing, "drawn_on", lambda device: draw)
    transformers_engine(trl, deterministic=deterministic)
    assert (made["steps"] is None, made["draw"]) == (deterministic, None if deterministic else draw)
