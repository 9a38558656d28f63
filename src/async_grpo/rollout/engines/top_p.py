"""Top-p sampling with a cumulative sum of integers, for deterministic runs on a GPU.

`torch.cumsum` of floats raises on CUDA under `torch.use_deterministic_algorithms` (it is in that function's list), and
`TopPLogitsWarper` of transformers calls it. The sum of integers is exact in any order, and does not raise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopPLogitsWarper

ONE = 2**62  # probability 1 as an integer; a float32 of 2**-38 or more is exact in it, and a sum of 2 has no room


class IntegerTopP(LogitsProcessor):
    """Keep the smallest set of most probable tokens whose probabilities sum to `top_p` or more.

    The set is that of `TopPLogitsWarper`, except where its sum of floats is rounded across the limit.

    Args:
        warper: of transformers, for its settings.
    """

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._removable = int((1 - warper.top_p) * ONE)
        self._least_kept, self._filter_value = warper.min_tokens_to_keep, warper.filter_value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V], `filter_value` for the tokens that are not kept."""
        ascending_BV, order_BV = torch.sort(scores, descending=False)
        shares_BV = (ascending_BV.softmax(dim=-1) * ONE).long()  # times a power of two: exact
        removed_BV = shares_BV.cumsum(dim=-1) <= self._removable
        removed_BV[..., -self._least_kept :] = False
        return scores.masked_fill(removed_BV.scatter(1, order_BV, removed_BV), self._filter_value)


def without_float_cumsum(processors: LogitsProcessorList, device: torch.device) -> LogitsProcessorList:
    """Return processors that may run on `device`: with `IntegerTopP` where the one of transformers would raise."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return processors
    return LogitsProcessorList([IntegerTopP(p) if type(p) is TopPLogitsWarper else p for p in processors])
