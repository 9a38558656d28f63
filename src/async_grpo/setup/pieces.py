"""What a model says of padded rows, computed in pieces: rows of about one length together, with less padding.

    rows of a batch               two pieces of it
    . . p p|c c c c c c c c       p p c c c c c c c c
    . . . p|c c . . . . . .       p c c .
    . p p p|c . . . . . . .       p p p c              . is padding

Prompts (p) are padded on the left, completions (c) on the right. In a piece every row begins at the first column, and
the results are put back where they were. A causal model reads nothing of what follows, so no mask tells it of padding:
attention without a mask takes a faster kernel, which computes half. A model for which the columns on the left matter,
as its positions count them, keeps them, and the mask. A trial decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from async_grpo.log import logger

Compute = Callable[[Tensor, Tensor, Tensor, int], Sequence[Tensor | None]]
"""Ids, the attention mask, the tokens that are asked for, each [B, W], C -> what is said of the last C columns."""

CALLS = 64  # tokens that a CPU computes while it makes the calls of a pass: 30 of a model of 4 M, 150 of .1 M
LAUNCHES = 2.5e12  # parameters x tokens: what an H100 at half its peak does while 28 layers are launched, 30 ms
MOST_LAUNCHES = 4096  # tokens
HIDDEN = 7 / 8  # of the launches, behind the products of a pass that takes longer
WORTH = 1 / 64  # one more piece saves as many of the tokens that are there
LONG = 256  # columns from which attention without a mask is faster
CUTS = 256  # most cuts at which rows may be divided
REAL, PADDED = 16, 8  # tokens of the trial
EXACT, ROUNDED = 1e-3, 0.05  # nats, mean of the tokens: more is not rounding in float32, or in what computes with less
MOST_ROUNDED = 0.5  # where a row of its own kind moves as far, only because another has padding
BY_LENGTH = ("dynamic", "longrope")  # rotary positions that change once a batch is longer than the original limit


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Some rows of a batch, and how many columns of them are computed."""

    rows: list[int]
    columns: int


@dataclass(frozen=True, slots=True)
class _Padding:
    """What of the padding of a model may be left out, and how small a piece may be."""

    left: bool  # only with the right
    right: bool
    masked: bool  # still: in float32 on a GPU, torch has no fast attention without a mask where heads share keys
    smallest: float  # tokens of a pass: fewer take as long
    each: float  # tokens that a CPU or a GPU could compute instead of beginning one more pass
    longest: float  # columns; longer batches stay whole


class Pieces:
    """Computes batches in pieces. All processes of an accelerator call it at the same times, and take as many pieces.

    Args:
        multiple: the columns of a piece are a multiple of it, or all of the batch.
    """

    def __init__(self, accelerator: Any, multiple: int = 1) -> None:
        self._accelerator, self._multiple = accelerator, multiple
        self._of_models: WeakKeyDictionary[Any, _Padding] = WeakKeyDictionary()

    def __call__(
        self, model: Any, compute: Compute, ids: Tensor, mask: Tensor, keep: int, most_rows: int | None = None
    ) -> tuple[tuple[Tensor | None, ...], int]:
        """Return what `compute` says of the batch, each [B, keep], and how many tokens it was given.

        Args:
            ids, mask: [B, W]; the last `keep` columns are the completions'.
            most_rows: no piece has more tokens than so many whole rows.
        """
        if model not in self._of_models:
            self._of_models[model] = self._tried(model, compute, ids[mask.bool()])
        padding, width = self._of_models[model], ids.shape[1]
        starts, stops, gaps = spans(mask, keep)
        whole = not padding.right or width > padding.longest
        shifted = padding.left and not whole and not gaps.any()
        starts = starts if shifted else torch.zeros_like(starts)
        lengths = [width] * len(ids) if whole else (stops - starts).tolist()
        pieces = self._pieces(padding, ids.device, lengths, width * (most_rows or len(ids)))
        mask_is_cheap = width < LONG or not shifted or min(lengths) == width
        if mask_is_cheap and len(pieces) == 1 and len(ids) * (width - pieces[0].columns) <= padding.each:
            return tuple(compute(ids, mask, mask, keep)), ids.numel()
        order = torch.tensor([row for piece in pieces for row in piece.rows], dtype=torch.long, device=ids.device)
        columns = torch.arange(width, device=ids.device)
        asked = mask * (columns >= width - keep)
        places, said = [], []
        for piece, of_it in zip(pieces, torch.split(order, [len(piece.rows) for piece in pieces]), strict=True):
            those = columns[: -(-piece.columns // self._multiple) * self._multiple]
            at = (starts[of_it, None] + those) % width  # padding goes behind the row
            own, attended, wanted = (it[of_it].gather(1, at) for it in (ids, mask, asked))
            if shifted and not padding.masked:
                attended = (those < piece.columns).to(mask).expand_as(at)
            said.append(compute(own, attended, wanted, len(those) - 1))
            places.append(at)
        wholes = (_whole(parts, places, width, order.argsort()) for parts in zip(*said, strict=True))
        return tuple(it if it is None else it[:, -keep:] for it in wholes), sum(at.numel() for at in places)

    def _pieces(self, padding: _Padding, device: torch.device, lengths: list[int], most: int) -> list[Rectangle]:
        pieces = divide(lengths, smallest=padding.smallest, each=padding.each, most=most)
        if self._accelerator.num_processes > 1:
            own = torch.tensor([[len(pieces), len(lengths)]], dtype=torch.long, device=device)
            counts, sizes = self._accelerator.gather(own).T.tolist()
            if len(set(sizes)) > 1:
                return [_piece(list(range(len(lengths))), lengths)]
            pieces = divided_further(pieces, lengths, max(counts))
        return pieces

    def _tried(self, model: Any, compute: Compute, tokens: Tensor) -> _Padding:
        """Compute some tokens alone and with padding: on each side, without its mask, of another row. The same?"""
        module = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        left, right, unmasked, rounding = (
            self._accelerator.gather(_apart(model, compute, tokens)[None]).amax(0).tolist()
        )
        is_float32 = _is_float32(module, self._accelerator)
        is_exact = is_float32 and (tokens.device.type == "cpu" or multiplies_in_float32())
        most = EXACT if is_exact else max(ROUNDED, min(2 * rounding, MOST_ROUNDED))
        may_cut = right <= most
        may_shift = all(nats <= most for nats in (left, right, unmasked))
        if not may_shift and self._accelerator.is_main_process:
            logger.info(
                "padding on the {} changes what {} computes, by {:.2g} nats a token, so {}",
                "left, or without a mask on the right," if may_cut else "right",
                type(module).__name__,
                max(left, unmasked) if may_cut else right,
                "only that on the right is left out" if may_cut else "padded rows are computed as they are",
            )
        smallest, each = cost_of_a_pass(module, tokens.device)
        masked, longest = is_float32 and tokens.device.type != "cpu", _longest(module)
        return _Padding(left=may_shift, right=may_cut, masked=masked, smallest=smallest, each=each, longest=longest)


def cost_of_a_pass(module: Any, device: torch.device) -> tuple[float, float]:
    """How many tokens the smallest pass takes as long as, and how many each further pass: `smallest` and `each`."""
    if device.type == "cpu":
        return 0.0, CALLS
    numbers = sum(parameter.numel() for parameter in module.parameters())
    smallest = min(MOST_LAUNCHES, LAUNCHES / max(1, numbers))
    return smallest, (1 - HIDDEN) * smallest


def spans(mask: Tensor, keep: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where each row begins, the column behind its end, and whether it has no prompt or a gap, each [B].

    One column of the prompt and one of the completion count as there.
    """
    columns, first = torch.arange(mask.shape[1], device=mask.device), mask.shape[1] - keep
    starts = columns.where(mask.bool(), mask.shape[1]).amin(1)
    stops = (columns + 1).where(mask.bool(), 0).amax(1)
    gaps = (starts >= first) | (stops - starts > mask.sum(1))
    return starts.clamp(max=first - 1), stops.clamp(min=first + 1), gaps


def divide(lengths: Sequence[int], *, smallest: float, each: float, most: int) -> list[Rectangle]:
    """Divide rows, the longest first, so that the tokens of all pieces are the fewest.

    Args:
        smallest: a piece of fewer tokens counts as so many.
        each: every piece counts as so many more, and `WORTH`.
        most: tokens of a piece of several rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    step = max(1, min(-(-len(order) // CUTS), most // lengths[order[0]]))
    cuts = [*range(0, len(order), step), len(order)]
    each += WORTH * sum(lengths)
    best: list[tuple[float, int]] = [(0, 0)]  # of the rows before each cut: the smallest sum, and the cut before it
    for here in range(1, len(cuts)):
        found: tuple[float, int] = (inf, here - 1)
        for before in reversed(range(here)):
            tokens = (cuts[here] - cuts[before]) * lengths[order[cuts[before]]]
            if tokens > most and before < here - 1:
                break
            found = min(found, (best[before][0] + max(tokens, smallest) + each, before))
        best.append(found)
    ends = [len(cuts) - 1]
    while ends[-1]:
        ends.append(best[ends[-1]][1])
    return [_piece(order[cuts[start] : cuts[stop]], lengths) for start, stop in pairwise(reversed(ends))]


def divided_further(pieces: Sequence[Rectangle], lengths: Sequence[int], count: int) -> list[Rectangle]:
    """As many pieces as `count`, or one for each row: those of the most rows are halved."""
    made = list(pieces)
    while len(made) < min(count, len(lengths)):
        largest = max(range(len(made)), key=lambda it: len(made[it].rows))
        of_it = made[largest].rows
        middle = len(of_it) // 2
        made[largest : largest + 1] = [_piece(of_it[:middle], lengths), _piece(of_it[middle:], lengths)]
    return made


def _piece(chosen: list[int], lengths: Sequence[int]) -> Rectangle:
    return Rectangle(chosen, max(lengths[row] for row in chosen))


def _whole(parts: Sequence[Tensor | None], places: Sequence[Tensor], width: int, back: Tensor) -> Tensor | None:
    """Put what is said of each piece into its columns and its rows of the batch, [B, W]."""
    known = ((part, at) for part, at in zip(parts, places, strict=True) if part is not None)
    rows = [part.new_zeros(len(part), width).scatter(1, at[:, 1:], part) for part, at in known]
    return torch.cat(rows).index_select(0, back) if rows else None


def _apart(model: Any, compute: Compute, tokens: Tensor) -> Tensor:
    """How far padding moves what a model says, [4], as means over tokens.

    On the left, on the right, on the right without a mask, and of another row.
    """
    row = tokens[torch.arange(REAL, device=tokens.device) % len(tokens)][None]

    def answer(left: int, right: int, of_another: int = 0, *, told: bool = True) -> Tensor:
        ids, mask = pad(row, (left, right), value=int(row[0, -1])), pad(torch.ones_like(row), (left, right))
        if of_another:  # attention takes another kernel, which rounds otherwise
            ids, mask = ids.repeat(2, 1), torch.cat([mask, pad(mask[:, of_another:], (of_another, 0))])
        said = compute(ids, mask if told else torch.ones_like(mask), mask, REAL - 1 + right)[0]
        assert said is not None, "a model that is trained says something of each token"
        return said[:1, : REAL - 1].float()

    with _evaluating(model):
        alone = answer(0, 0)
        padded = answer(PADDED, 0), answer(0, PADDED), answer(0, PADDED, told=False), answer(0, 0, PADDED)
        return torch.stack([(it - alone).abs().mean() for it in padded])


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Inside this block the model draws no random numbers, and keeps nothing for a backward pass."""
    # bitsandbytes packs the weights of a linear layer that does not train otherwise, on a CPU.
    modes = [(module, module.training) for module in model.modules() if not isinstance(module, nn.Linear)]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _is_float32(module: Any, accelerator: Any) -> bool:
    """Whether the model computes in float32, or in TF32."""
    return accelerator.mixed_precision in (None, "no") and all(it.dtype == torch.float32 for it in module.parameters())


def multiplies_in_float32() -> bool:
    """Whether a GPU computes products of float32 as such, and not in TF32."""
    with suppress(RuntimeError):  # torch's answer where its older and its newer settings were mixed
        return torch.get_float32_matmul_precision() == "highest"
    return False


def _longest(module: Any) -> float:
    """The most columns of a batch for which rotary positions do not depend on its length."""
    config: Any = getattr(module, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "rope_parameters", None) or {}
    kinds = [found, *(it for it in found.values() if isinstance(it, dict))]  # one, or one for each kind of layer
    of_each = (kind for kind in kinds if kind.get("rope_type") in BY_LENGTH)
    limits = (kind.get("original_max_position_embeddings") or config.max_position_embeddings for kind in of_each)
    return min(limits, default=inf)
