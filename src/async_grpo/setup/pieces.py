"""What a model says of padded rows, computed in pieces: rows of about one length together, without their padding.

    rows of a batch               two pieces of it
    . . p p|c c c c c c c c       p p|c c c c c c c c
    . . . p|c c . . . . . .         p|c c
    . p p p|c . . . . . . .       p p p|c .            . is padding

Prompts (p) are padded on the left, completions (c) on the right. Columns that are padding in every row of a piece are
left out, and the results are put back where they were. Without columns on the right, a causal model computes the same.
Without columns on the left, it does where its positions are relative or count what is there; a trial decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from async_grpo.log import logger

Span = tuple[int, int]  # the first column of a row that is there, and the column behind the last
Compute = Callable[[Tensor, Tensor, int], Sequence[Tensor | None]]
"""Ids [B, W], mask [B, W], C -> what the model says of the last C columns, each [B, C] or None."""

CALLS = 64  # tokens that a CPU computes while it makes the calls of a pass: 30 of a model of 4 M, 150 of .1 M
LAUNCHES = 2.5e12  # parameters x tokens: what an H100 at half its peak does while 28 layers are launched, 30 ms
MOST_LAUNCHES = 4096  # tokens
HIDDEN = 7 / 8  # of the launches, behind the products of a pass that takes longer
WORTH = 1 / 64  # one more piece saves as many of the tokens that are there
CUTS = 256  # most cuts at which rows may be divided
REAL, PADDED = 16, 8  # tokens of the trial
EXACT, ROUNDED = 1e-3, 0.05  # nats, mean of the tokens: more is not rounding in float32, or in what computes with less
MOST_ROUNDED = 0.5  # where a row of its own kind moves as far, only because another has padding
BY_LENGTH = ("dynamic", "longrope")  # rotary positions that change once a batch is longer than the original limit


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Some rows of a batch, and the columns of them that are computed."""

    rows: list[int]
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        return len(self.rows) * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class _Padding:
    """What of the padding of a model may be left out, and how small a piece may be."""

    left: bool
    right: bool
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
        padding = self._padding(model, compute, ids, mask)
        pieces = self._pieces(padding, ids.device, spans(mask, keep), ids.shape[1], most_rows or len(ids))
        if len(pieces) == 1 and pieces[0].tokens == ids.numel():
            return tuple(compute(ids, mask, keep)), ids.numel()
        first = ids.shape[1] - keep  # column of the completions
        order = torch.tensor([row for piece in pieces for row in piece.rows], dtype=torch.long, device=ids.device)
        parts = []
        for piece, rows in zip(pieces, torch.split(order, [len(piece.rows) for piece in pieces]), strict=True):
            columns = slice(piece.start, piece.stop)
            parts.append(compute(ids[rows, columns], mask[rows, columns], piece.stop - first))
        answers = tuple(_whole(column, keep, order.argsort()) for column in zip(*parts, strict=True))
        return answers, sum(piece.tokens for piece in pieces)

    def _pieces(
        self, padding: _Padding, device: torch.device, rows: list[Span], width: int, most_rows: int
    ) -> list[Rectangle]:
        rows = [(start if padding.left else 0, stop if padding.right else width) for start, stop in rows]
        if not padding.right or width > padding.longest:
            rows = [(0, width)] * len(rows)
        pieces = divide(rows, smallest=padding.smallest, each=padding.each, most=most_rows * width)
        if self._accelerator.num_processes > 1:
            own = torch.tensor([[len(pieces), len(rows)]], dtype=torch.long, device=device)
            counts, sizes = self._accelerator.gather(own).T.tolist()
            if len(set(sizes)) > 1:
                return [Rectangle(list(range(len(rows))), 0, width)]
            pieces = divided_further(pieces, rows, max(counts))
        return [self._rounded(piece, width) for piece in pieces]

    def _rounded(self, piece: Rectangle, width: int) -> Rectangle:
        """Take more columns, on the left first."""
        columns = min(width, -(-(piece.stop - piece.start) // self._multiple) * self._multiple)
        start = max(0, piece.stop - columns)
        return replace(piece, start=start, stop=start + columns)

    def _padding(self, model: Any, compute: Compute, ids: Tensor, mask: Tensor) -> _Padding:
        if model not in self._of_models:
            self._of_models[model] = self._tried(model, compute, ids[mask.bool()])
        return self._of_models[model]

    def _tried(self, model: Any, compute: Compute, tokens: Tensor) -> _Padding:
        """Compute some tokens alone, with padding on each side, and with another row's: do the answers differ?"""
        module = self._accelerator.unwrap_model(model, keep_torch_compile=False)
        *apart, rounding = self._accelerator.gather(_apart(model, compute, tokens)[None]).amax(0).tolist()
        most = EXACT if _is_exact(module, self._accelerator) else max(ROUNDED, min(2 * rounding, MOST_ROUNDED))
        left, right = (nats <= most for nats in apart)
        if not (left and right) and self._accelerator.is_main_process:
            logger.info(
                "padding on the {} changes what {} computes, by {:.2g} nats a token, so {}",
                "right" if not right else "left",
                type(module).__name__,
                apart[1 if not right else 0],
                "padded rows are computed as they are" if not right else "only that on the right is left out",
            )
        smallest, each = cost_of_a_pass(module, tokens.device)
        return _Padding(left=left, right=right, smallest=smallest, each=each, longest=_longest(module))


def cost_of_a_pass(module: Any, device: torch.device) -> tuple[float, float]:
    """How many tokens the smallest pass takes as long as, and how many each further pass: `smallest` and `each`."""
    if device.type == "cpu":
        return 0.0, CALLS
    numbers = sum(parameter.numel() for parameter in module.parameters())
    smallest = min(MOST_LAUNCHES, LAUNCHES / max(1, numbers))
    return smallest, (1 - HIDDEN) * smallest


def spans(mask: Tensor, keep: int) -> list[Span]:
    """The columns of each row that are there. One of the prompt and one of the completion count as there."""
    columns = torch.arange(mask.shape[1], device=mask.device)
    starts = columns.where(mask.bool(), mask.shape[1]).amin(1).clamp(max=mask.shape[1] - keep - 1)
    stops = (columns + 1).where(mask.bool(), 0).amax(1).clamp(min=mask.shape[1] - keep + 1)
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def divide(rows: Sequence[Span], *, smallest: float, each: float, most: int) -> list[Rectangle]:
    """Divide rows, the longest first, so that the tokens of all pieces are the fewest.

    Args:
        smallest: a piece of fewer tokens counts as so many.
        each: every piece counts as so many more, and `WORTH`.
        most: tokens of a piece of several rows.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row][0] - rows[row][1])
    widest = max(stop for _, stop in rows) - min(start for start, _ in rows)
    step = max(1, min(-(-len(rows) // CUTS), most // widest))
    cuts = [*range(0, len(rows), step), len(rows)]
    there = sum(stop - start for start, stop in rows)
    each += WORTH * there
    if len(rows) * widest <= min(there + each, most):  # a second piece would cost more than all that it could save
        return [_piece(order, rows)]
    best: list[tuple[float, int]] = [(0, 0)]  # of the rows before each cut: the smallest sum, and the cut before it
    for here in range(1, len(cuts)):
        found: tuple[float, int] = (inf, here - 1)
        start, stop = rows[order[cuts[here] - 1]]
        for before in reversed(range(here)):
            for row in order[cuts[before] : cuts[before + 1]]:
                start, stop = min(start, rows[row][0]), max(stop, rows[row][1])
            tokens = (cuts[here] - cuts[before]) * (stop - start)
            if tokens > most and before < here - 1:
                break
            found = min(found, (best[before][0] + max(tokens, smallest) + each, before))
        best.append(found)
    ends = [len(cuts) - 1]
    while ends[-1]:
        ends.append(best[ends[-1]][1])
    return [_piece(order[cuts[start] : cuts[stop]], rows) for start, stop in pairwise(reversed(ends))]


def divided_further(pieces: Sequence[Rectangle], rows: Sequence[Span], count: int) -> list[Rectangle]:
    """As many pieces as `count`, or one for each row: those of the most rows are halved."""
    made = list(pieces)
    while len(made) < min(count, len(rows)):
        largest = max(range(len(made)), key=lambda it: len(made[it].rows))
        of_it = made[largest].rows
        middle = len(of_it) // 2
        made[largest : largest + 1] = [_piece(of_it[:middle], rows), _piece(of_it[middle:], rows)]
    return made


def _piece(chosen: list[int], rows: Sequence[Span]) -> Rectangle:
    starts, stops = zip(*(rows[row] for row in chosen), strict=True)
    return Rectangle(chosen, min(starts), max(stops))


def _whole(parts: Sequence[Tensor | None], keep: int, back: Tensor) -> Tensor | None:
    """The rows of all pieces, [B, keep], in their own order."""
    padded = [pad(part, (0, keep - part.shape[1])) for part in parts if part is not None]
    return torch.cat(padded).index_select(0, back) if padded else None


def _apart(model: Any, compute: Compute, tokens: Tensor) -> Tensor:
    """How far padding on the left, on the right, and of another row moves what a model says: means over tokens, [3]."""
    row = tokens[torch.arange(REAL, device=tokens.device) % len(tokens)][None]

    def answer(left: int, right: int, of_another: int = 0) -> Tensor:
        ids, mask = pad(row, (left, right), value=int(row[0, -1])), pad(torch.ones_like(row), (left, right))
        if of_another:  # attention takes another kernel, which rounds otherwise
            ids, mask = ids.repeat(2, 1), torch.cat([mask, pad(mask[:, of_another:], (of_another, 0))])
        said = compute(ids, mask, REAL - 1 + right)[0]
        assert said is not None, "a model that is trained says something of each token"
        return said[:1, : REAL - 1].float()

    with _evaluating(model):
        alone = answer(0, 0)
        sides = (PADDED, 0), (0, PADDED), (0, 0, PADDED)
        return torch.stack([(answer(*padding) - alone).abs().mean() for padding in sides])


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


def _is_exact(module: Any, accelerator: Any) -> bool:
    """Whether the model computes in float32."""
    if any(parameter.dtype != torch.float32 for parameter in module.parameters()):
        return False
    is_cpu = accelerator.device.type == "cpu"
    return accelerator.mixed_precision in (None, "no") and (is_cpu or multiplies_in_float32())


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
