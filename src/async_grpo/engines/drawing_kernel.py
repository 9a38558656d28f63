"""Tokens drawn in one pass over the logits, by a Triton kernel: torch's own kernels go through them some ten times.

A token is the largest of `score - log(q)` with q from an exponential distribution (Gumbel-max: Maddison et al.,
"A* Sampling", 2014, page 2); torch.multinomial divides by the same q. The logsumexp is kept up meanwhile (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a row's program has at a time


def drawn_in_one_pass(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample from the softmax of the scores. Its random numbers come from torch's generator of the device.

    Where a logit is NaN, the log-probability is, too, and the group is refused when it is written.
    """
    rows, vocabulary = logits_bV.shape
    device = logits_bV.device
    sampled_b = torch.empty(rows, dtype=torch.long, device=device)
    logprobs_b = torch.empty(rows, dtype=torch.float32, device=device)
    seeds_b = torch.randint(2**31 - 1, (rows,), dtype=torch.int32, device=device)
    _draw[(rows,)](
        logits_bV.contiguous(), scores_bV.contiguous(), seeds_b, sampled_b, logprobs_b, vocabulary, float(temperature),
        ONE=scores_bV is logits_bV, BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=8,
    )  # fmt: skip
    return sampled_b, logprobs_b


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, scores, seeds, sampled, logprobs, vocabulary, temperature, ONE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(seeds + row)
    lane = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)  # logit of each lane so far
    total = tl.zeros((BLOCK,), tl.float32)  # sum of exp(logit - highest)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_token = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + lane
        inside = token < vocabulary
        score = tl.load(logits + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        logit = score / temperature
        higher = tl.maximum(highest, logit)
        base = tl.where(higher == float("-inf"), 0.0, higher)  # of lanes without a finite logit yet
        total = total * tl.exp(highest - base) + tl.exp(logit - base)
        highest = higher
        if not ONE:  # a logits processor made them
            score = tl.load(scores + row * vocabulary + token, mask=inside, other=float("-inf")).to(tl.float32)
        uniform = tl.rand(seed, token) + 1.1641532e-10  # 2 ** -33, so that it is never 0
        # -log(1 - u), which has few digits where u is small: the numbers that win
        exponential = tl.where(uniform < 1e-3, uniform * (1.0 + 0.5 * uniform), -tl.log(1.0 - uniform))
        score = score - tl.log(exponential)
        better = score > best
        best = tl.where(better, score, best)
        best_token = tl.where(better, token, best_token)
    top = tl.max(highest, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(highest - top), 0))
    winner = tl.argmax(best, 0)
    chosen = tl.sum(tl.where(lane == winner, best_token, 0), 0)
    logit = tl.load(logits + row * vocabulary + chosen).to(tl.float32) / temperature
    tl.store(sampled + row, chosen.to(tl.int64))
    tl.store(logprobs + row, logit - normalizer)
