"""Chooses how tokens are drawn on a device."""

from __future__ import annotations

import torch

from async_grpo.engines.decoding import Draw
from async_grpo.errors import reason_of
from async_grpo.log import logger


def drawn_on(device: torch.device) -> Draw | None:
    """Kernels that read the logits once; None where they cannot be compiled, or are wrong, or on a CPU."""
    if device.type != "cuda":
        return None
    try:
        from async_grpo.engines.drawing_kernel import drawn_in_one_pass

        refused = _wrong(drawn_in_one_pass, device)
    except Exception as error:  # noqa: BLE001  # no Triton, no compiler, another GPU than it knows
        refused = reason_of(error)
    if refused is None:
        return drawn_in_one_pass
    logger.warning("tokens are sampled by torch's kernels, not by those that read the logits once: {}", refused)
    return None


def _wrong(draw: Draw, device: torch.device, rows: int = 64) -> str | None:
    """Say how they differ from torch's kernels, also where most tokens are ruled out; None: they do not."""
    logits_bV = torch.randn((rows, 5008), dtype=torch.bfloat16, device=device)
    ruled_out = torch.rand(logits_bV.shape, dtype=torch.float32, device=device) < 0.9
    masked_bV = logits_bV.float().masked_fill(ruled_out, float("-inf"))
    for scores_bV, temperature in ((logits_bV, 1.0), (masked_bV, 0.7)):
        sampled_b, logprobs_b = draw(logits_bV, scores_bV, temperature)
        if not bool(scores_bV.gather(1, sampled_b[:, None]).isfinite().all()):
            return "they sample what is ruled out"
        exact_bV = torch.log_softmax(logits_bV.float() / temperature, dim=-1)
        apart = float((logprobs_b - exact_bV.gather(1, sampled_b[:, None])[:, 0]).abs().max())
        if not apart < 1e-4:
            return f"they have log-probabilities that are {apart:.2g} off"
    return None
