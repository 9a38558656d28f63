"""Draws a token from each row of logits, with the log-probability that the trainer would compute for it.

Shapes: b rows, V the vocabulary. `logits_bV` are the model's own, in its dtype; `scores_bV` what is sampled from, the
same tensor where no logits processor changes it. Log-probabilities are float32 natural logs of the full softmax of the
logits at a temperature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from async_grpo.errors import reason_of
from async_grpo.log import logger

Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Of logits, scores and temperature: tokens `[b]` and their log-probabilities `[b]`."""


def drawn(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample from the softmax of the scores, by torch's own kernels."""
    sampled_b = torch.multinomial(torch.softmax(scores_bV.float(), dim=-1), num_samples=1)[:, 0]
    return sampled_b, _logprobs(logits_bV, sampled_b, temperature)


def likeliest(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Take the token with the highest score."""
    sampled_b = scores_bV.argmax(dim=-1)
    return sampled_b, _logprobs(logits_bV, sampled_b, temperature)


def _logprobs(logits_bV: Tensor, sampled_b: Tensor, temperature: float) -> Tensor:
    logprobs_bV = torch.log_softmax(logits_bV.float() / temperature, dim=-1)
    return logprobs_bV.gather(1, sampled_b[:, None])[:, 0]


def drawn_on(device: torch.device) -> Draw:
    """The fastest way on a device: one kernel that reads the logits once, where it can be compiled and is right."""
    if device.type != "cuda":
        return drawn
    try:
        from async_grpo.rollout.engines.drawing_kernel import drawn_in_one_pass

        refused = _wrong(drawn_in_one_pass, device)
    except Exception as error:  # noqa: BLE001  # no Triton, no compiler, another GPU than it knows
        refused = reason_of(error)
    if refused is None:
        return drawn_in_one_pass
    logger.warning("tokens are sampled by several kernels, since one that reads the logits once {}", refused)
    return drawn


def _wrong(draw: Draw, device: torch.device, rows: int = 64) -> str | None:
    """Try it, also where most tokens are ruled out; what it does not do as `drawn` does."""
    logits_bV = torch.randn((rows, 5000), device=device)
    ruled_out = torch.rand(logits_bV.shape, device=device) < 0.9
    for scores_bV in (logits_bV, logits_bV.masked_fill(ruled_out, float("-inf"))):
        sampled_b, logprobs_b = draw(logits_bV, scores_bV, 0.7)
        if not bool(scores_bV.gather(1, sampled_b[:, None]).isfinite().all()):
            return "samples what is ruled out"
        apart = float((logprobs_b - _logprobs(logits_bV, sampled_b, 0.7)).abs().max())
        if not apart < 1e-4:
            return f"has log-probabilities that are {apart:.2g} off"
    return None
