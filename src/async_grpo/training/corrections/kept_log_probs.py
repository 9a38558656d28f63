"""Log-probabilities over the tokens that truncated sampling kept, in place of those of the full softmax.

With S, the tokens that `top_p`, `top_k` or `min_p` left to a position, and z, the logits over the temperature:

    log pi_S(y) = z_y - log sum_{s in S} exp z_s

The policy in training, the old one and the reference are all taken over the sampler's S, so that their ratios are those
of distributions over the same tokens: "Keep Sampling Mask" of DeepSeek-V3.2, arXiv 2512.02556, section 3.1.

Only the logits of kept tokens are computed for it, in pieces, and once more in the backward pass. TRL computes the
full softmax as well, for the entropy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from async_grpo.errors import UnsupportedError
from async_grpo.records import RolloutGroup
from async_grpo.setup.trl_compat import whole_head
from async_grpo.tokens.kept_tokens import unpack

SIZES, IDS = "kept_sizes", "kept_ids"  # in a batch: int32, [B, C] and [B, E]; `KeptTokens`, one completion a row
PIECE = 1 << 23  # numbers in a piece of the rows of the head, [entries, hidden size]

Row = tuple[np.ndarray, np.ndarray]  # sizes and ids of one completion


def rows_of(groups: Sequence[RolloutGroup]) -> list[Row]:
    """The sets of each completion of the groups; of a group that has none, sizes of 0."""
    return [row for group in groups for row in _rows(group)]


def _rows(group: RolloutGroup) -> list[Row]:
    ends = group.completion_lengths.cumsum()[:-1]
    if group.kept_tokens is None:
        return [(sizes, np.zeros(0, np.int32)) for sizes in np.split(np.zeros_like(group.completion_ids), ends)]
    found = unpack(group.kept_tokens, group.completion_ids)
    of_each = np.split(found.sizes, ends)
    bounds = np.cumsum([sizes.sum() for sizes in of_each])[:-1]
    return list(zip(of_each, np.split(found.ids, bounds), strict=True))


def columns(rows: Sequence[Row], tokens: int, device: torch.device) -> dict[str, Tensor]:
    """The rows as entries of a batch whose completions are padded to `tokens`."""
    sizes = torch.zeros(len(rows), tokens, dtype=torch.int32, device="cpu")
    ids = sizes.new_zeros(len(rows), max(len(row_ids) for _, row_ids in rows))
    for index, (row_sizes, row_ids) in enumerate(rows):
        sizes[index, : len(row_sizes)] = torch.from_numpy(row_sizes)
        ids[index, : len(row_ids)] = torch.from_numpy(row_ids)
    return {SIZES: sizes.to(device), IDS: ids.to(device)}


@dataclass(frozen=True, slots=True)
class Sets:
    """The sets of N tokens, back to back; in each the token itself comes first."""

    sizes: Tensor  # [N], int64; 0: not known
    ids: Tensor  # [sum(sizes)], int64

    @classmethod
    def of_batch(cls, batch: Mapping[str, Tensor], mask: Tensor) -> Sets:
        """Take the sets of the tokens in `mask`, [B, C], row by row."""
        sizes_BC, ids_BE = batch[SIZES].long(), batch[IDS].long()
        sizes_BC = pad(sizes_BC, (0, mask.shape[1] - sizes_BC.shape[1]))
        positions_E = torch.arange(ids_BE.shape[1], device=ids_BE.device)
        ids = ids_BE[positions_E < sizes_BC.sum(1, keepdim=True)]
        return cls(sizes_BC[mask], ids[torch.repeat_interleave(mask.flatten(), sizes_BC.flatten())])


class OverKeptTokens:
    """In the place of TRL's function of log-probabilities, which TRL calls for the tokens of a batch in their order."""

    def __init__(self, sets: Sets) -> None:
        self._full: Any = None  # TRL's function
        self._sizes, self._ids = sets.sizes, sets.ids
        self._tokens_done = self._ids_done = 0

    @property
    def left(self) -> int:
        """Tokens that it was not called for yet."""
        return len(self._sizes) - self._tokens_done

    def instead_of(self, function: Any) -> OverKeptTokens:
        """Take the place of TRL's `function`, and ask it for the full softmax."""
        self._full = function
        return self

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        *outputs: Any,
    ) -> tuple[Any, ...]:
        """As TRL's: log-probabilities [N], and statistics of the full softmax."""
        full, *statistics = self._full.apply(
            hidden, weight, bias, targets, temperature, chunk_size, softcap, logit_scale, *outputs
        )
        sets = self._next(targets, len(weight))
        scale = Scale(temperature, logit_scale, softcap)
        kept = cast(Tensor, KeptLogProbs.apply(hidden, weight, bias, sets, scale))  # type: ignore[no-untyped-call]  # torch's
        known = sets.sizes > 0
        return (kept if bool(known.all()) else torch.where(known, kept, full)), *statistics

    def _next(self, targets: Tensor, vocabulary: int) -> Sets:
        sizes = self._sizes[self._tokens_done : self._tokens_done + len(targets)].to(targets.device)
        self._tokens_done += len(targets)
        ids = self._ids[self._ids_done : self._ids_done + int(sizes.sum())].to(targets.device)
        self._ids_done += len(ids)
        known = sizes > 0
        firsts = (sizes.cumsum(0) - sizes)[known]
        if len(sizes) != len(targets) or not torch.equal(ids[firsts], targets[known]):
            raise UnsupportedError(
                "TRL computes log-probabilities of other tokens than those that truncated sampling was recorded for. "
                "Set top_p=1, top_k=0 and min_p=None in the GRPOConfig, or take --generator hf."
            )
        if len(ids) and int(ids.max()) >= vocabulary:
            raise UnsupportedError(
                f"A group names the kept token {int(ids.max())}, and the model has {vocabulary} tokens. Was it sampled "
                "by workers with another model? Start another run with --run-dir OTHER."
            )
        return Sets(sizes, ids)


@dataclass(frozen=True, slots=True)
class Scale:
    """What is done with the products of hidden states and head before the softmax."""

    temperature: float
    logit_scale: float
    softcap: float | None

    def __call__(self, products: Tensor) -> Tensor:
        scaled = products * self.logit_scale
        if self.softcap is not None:
            scaled = self.softcap * torch.tanh(scaled / self.softcap)
        return scaled / self.temperature

    def slope(self, logits: Tensor) -> Tensor | float:
        """The derivative at the products that gave `logits`."""
        slope = self.logit_scale / self.temperature
        if self.softcap is None:
            return slope
        return slope * (1 - (logits * self.temperature / self.softcap) ** 2)


class KeptLogProbs(torch.autograd.Function):
    """Log-probabilities [N], float32, over the sets of kept tokens; 0 where a set is not known.

    Nothing of the size of the vocabulary is made but, where the head trains, its gradient in float32 [V, H].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, sets: Sets, scale: Scale
    ) -> Tensor:  # hidden [N, H], weight [V, H], bias [V]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        ctx.save_for_backward(hidden, weight, bias)
        ctx.sets, ctx.scale, ctx.dtype = sets, scale, dtype
        logprobs = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for piece in _pieces(sets, hidden.shape[1]):
            *_, logits, norms = piece.logits(hidden, weight, bias, scale, dtype)
            logprobs[piece.known] = logits[piece.firsts] - norms[piece.known - piece.start]
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (grad_N,) = grads
        hidden, weight, bias = ctx.saved_tensors
        with whole_head(weight, bias):
            grad_hidden, grad_weight, grad_bias = (
                torch.zeros(each.shape, dtype=torch.float32, device=each.device) if wanted else None
                for each, wanted in zip((hidden, weight, bias), ctx.needs_input_grad)
            )
            for piece in _pieces(ctx.sets, hidden.shape[1]):
                hidden_E, head_E, logits_E, norms = piece.logits(hidden, weight, bias, ctx.scale, ctx.dtype)
                # d log pi_S(y) / dz_s = 1[s = y] - pi_S(s)
                grad_E = -torch.exp(logits_E - norms[piece.tokens - piece.start])
                grad_E[piece.firsts] += 1
                grad_E *= grad_N[piece.tokens] * ctx.scale.slope(logits_E)
                if grad_hidden is not None:
                    grad_hidden.index_add_(0, piece.tokens, grad_E[:, None] * head_E)
                if grad_weight is not None:
                    grad_weight.index_add_(0, piece.ids, grad_E[:, None] * hidden_E)
                if grad_bias is not None:
                    grad_bias.index_add_(0, piece.ids, grad_E)
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring tokens, and the E entries of their sets."""

    start: int  # of its tokens
    stop: int
    tokens: Tensor  # [E], the token that each entry belongs to
    ids: Tensor  # [E]
    known: Tensor  # the tokens that have sets
    firsts: Tensor  # their own entries

    def logits(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states [E, H], rows of the head [E, H], logits [E], and the logarithm of each token's sum [tokens]."""
        rows, heads = hidden[self.tokens].to(dtype).float(), weight[self.ids].to(dtype).float()
        products = (rows * heads).sum(-1)
        if bias is not None:
            products = products + bias[self.ids].to(dtype).float()
        logits, positions = scale(products), self.tokens - self.start
        most = logits.new_full((self.stop - self.start,), -torch.inf).scatter_reduce_(0, positions, logits, "amax")
        sums = torch.zeros_like(most).index_add_(0, positions, torch.exp(logits - most[positions]))
        return rows, heads, logits, most + torch.log(sums)


def _pieces(sets: Sets, hidden_size: int) -> list[_Piece]:
    """The tokens in pieces of about `PIECE` numbers; one token is never divided."""
    most = max(1, PIECE // hidden_size)
    ends = sets.sizes.cumsum(0).cpu()
    pieces, start, done = [], 0, 0
    while start < len(ends):
        stop = max(start + 1, int(torch.searchsorted(ends, done + most, right=True)))
        sizes = sets.sizes[start:stop]
        tokens = torch.repeat_interleave(torch.arange(start, stop, device=sizes.device), sizes)
        entries = sets.ids[done : done + len(tokens)]
        known = sizes > 0
        firsts = (sizes.cumsum(0) - sizes)[known]
        pieces.append(_Piece(start, stop, tokens, entries, known.nonzero()[:, 0] + start, firsts))
        start, done = stop, done + len(tokens)
    return pieces
