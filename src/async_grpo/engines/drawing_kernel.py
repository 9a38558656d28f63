"""Tokens drawn by two Triton kernels, of which one reads the logits once: torch's own go through them some ten times.

The first sums the probabilities of each block of the vocabulary, by as many programs as there are blocks and rows. The
second draws a block and a token in it, by inversion (Devroye, "Non-Uniform Random Variate Generation", 1986, page 85):
two random numbers a row. A Gumbel-max needs one for each logit, and most of its instructions make them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a program


def drawn_in_one_pass(logits_bV: Tensor, scores_bV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample from the softmax of the scores. Its random numbers come from torch's generator of the device.

    Where a logit is NaN or infinity, or all scores rule their tokens out, the log-probability is NaN, and the group is
    refused when it is written.
    """
    rows, vocabulary = logits_bV.shape
    device, block = logits_bV.device, min(BLOCK, triton.next_power_of_2(vocabulary))
    sampled_b = torch.empty(rows, dtype=torch.long, device=device)
    logprobs_b = torch.empty(rows, dtype=torch.float32, device=device)
    uniform_b2 = torch.rand(rows, 2, dtype=torch.float32, device=device)
    one = scores_bV is logits_bV and temperature == 1
    logits_bV, scores_bV = logits_bV.contiguous(), scores_bV.contiguous()
    sums_b2K = _sums(logits_bV, temperature, block)
    scores_sums_b2K = sums_b2K if one else _sums(scores_bV, 1.0, block)
    blocks = sums_b2K.shape[2]
    _draw[(rows,)](
        logits_bV, scores_bV, sums_b2K, scores_sums_b2K, uniform_b2, sampled_b, logprobs_b, float(temperature),
        vocabulary, blocks, BLOCK=block, BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
    return sampled_b, logprobs_b


def _sums(logits_bV: Tensor, temperature: float, block: int) -> Tensor:
    """The highest logit of each block, and the sum of exp(logit - highest): `[b, 2, K]` for K blocks."""
    rows, vocabulary = logits_bV.shape
    blocks = triton.cdiv(vocabulary, block)
    sums_b2K = torch.empty(rows, 2, blocks, dtype=torch.float32, device=logits_bV.device)
    _sum[(rows, blocks)](logits_bV, sums_b2K, float(temperature), vocabulary, blocks, BLOCK=block)
    return sums_b2K


# Triton has no types, and its kernels take addresses: to mypy they are untyped.


@triton.jit  # type: ignore[untyped-decorator]
def _sum(logits, sums, temperature, vocabulary, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    logit = logit / temperature
    highest = tl.max(logit, 0)
    tl.store(sums + row * 2 * blocks + block, highest)
    tl.store(sums + row * 2 * blocks + blocks + block, tl.sum(_exp(logit, highest), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    logits, scores, sums, scores_sums, uniform, sampled, logprobs, temperature, vocabulary, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top, weights = _weights(sums, row, blocks, BLOCKS)
    normalizer = tl.log(tl.sum(weights, 0))
    _, weights = _weights(scores_sums, row, blocks, BLOCKS)
    first = BLOCK * _drawn(weights, tl.load(uniform + 2 * row), BLOCKS)
    token = first + tl.arange(0, BLOCK)
    score = tl.load(scores + row * vocabulary + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    chosen = first + _drawn(_exp(score, tl.max(score, 0)), tl.load(uniform + 2 * row + 1), BLOCK)
    chosen = tl.minimum(chosen, vocabulary - 1)  # it could be more where there are NaNs
    tl.store(sampled + row, chosen.to(tl.int64))
    logprob = tl.load(logits + row * vocabulary + chosen).to(tl.float32) / temperature - top - normalizer
    tl.store(logprobs + row, tl.where(tl.sum(weights, 0) > 0, logprob, float("nan")))


@triton.jit  # type: ignore[untyped-decorator]
def _weights(sums, row, blocks, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.arange(0, BLOCKS)
    highest = tl.load(sums + row * 2 * blocks + block, mask=block < blocks, other=float("-inf"))
    total = tl.load(sums + row * 2 * blocks + blocks + block, mask=block < blocks, other=0.0)
    top = tl.max(highest, 0)
    return top, total * _exp(highest, top)


@triton.jit
def _exp(values, highest):  # type: ignore[no-untyped-def]
    return tl.exp(values - tl.where(highest == float("-inf"), 0.0, highest))


@triton.jit  # type: ignore[untyped-decorator]
def _drawn(weights, uniform, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index whose share of the sum reaches a number of [0, 1), and never one of weight 0."""
    sums = tl.where(weights > 0, tl.cumsum(weights, 0), 0.0)  # a parallel sum may rise and fall by a rounding
    return tl.min(tl.where(sums > uniform * tl.max(sums, 0), tl.arange(0, SIZE), SIZE - 1), 0)
