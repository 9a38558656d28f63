"""Copies of many tensors at the speed of one.

A copy of 400 small tensors is bound by the cost of 400 calls, not by memory. So:

* neighbours that lie the same way in source and destination are copied as one run (after `flatten_parameters`: all);
* on the CPU, runs of 4 MB and more are left to torch, whose threads share one copy; smaller ones are cut into pieces
  that torch copies in the calling thread, and a few threads take portions of 2 MB of them, one after the other, without
  the interpreter's lock (torch's threads would get equal shares of each tensor and wait for each other after it; on
  2 cores with two other busy processes, 300 tensors of 1 MB take 28 ms this way, 144 ms by `_foreach_copy_`);
* with a GPU, one fused kernel copies all tensors of a pair of dtypes (torch fuses no list that mixes them); between
  GPUs without peer access, see `staging`.
"""

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from async_grpo_ipc.layout import ALIGNMENT, is_dense
from async_grpo_ipc.staging import Staging, staged_steps

MAX_THREADS = 8  # what it takes to fill a server's memory bus
BYTES_WORTH_A_THREAD = 4 << 20
PORTION_BYTES = 2 << 20  # what a thread takes at a time: some 100 us of work
PIECE_ELEMENTS = 1 << 15  # up to here torch's copy stays in the calling thread (its "grain size")
LARGE_RUN_BYTES = 4 << 20

Portion = tuple[list[Tensor], list[Tensor]]  # destinations, sources

_padded: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def allow_merging_over_padding(block: Tensor) -> None:
    """Say that the bytes between neighbouring tensors of this block mean nothing, so that copies may overwrite them."""
    _padded.add(block.untyped_storage())


class CopyPlan:
    """A prepared copy of each source into its destination. Run it as often as the `movable` side keeps its address."""

    def __init__(
        self,
        destinations: Sequence[Tensor],
        sources: Sequence[Tensor],
        *,
        movable: Sequence[Tensor],
        staging: Staging | None = None,
    ) -> None:
        self._movable = movable
        self._addresses = _addresses(movable)
        pairs = [(d.detach(), s.detach()) for d, s in zip(destinations, sources, strict=True) if d.numel()]
        runs = _merge_neighbours(pairs)
        self._steps = _steps(runs) if staging is None else staged_steps(runs, staging)

    def is_fresh(self) -> bool:
        """Whether no movable tensor has gone to other memory since (`model.to(...)`, `param.data = ...`)."""
        return _addresses(self._movable) == self._addresses

    def run(self) -> None:
        for step in self._steps:
            step()


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))  # with every publish and pull: a map is twice as fast as a loop


@dataclass(slots=True)
class _CopyRun:
    """Elements that lie one after the other in both tensors' storages."""

    destination: Tensor
    source: Tensor
    numel: int


def _merge_neighbours(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    merged: list[tuple[Tensor, Tensor]] = []
    run: _CopyRun | None = None
    for destination, source in pairs:
        if not _same_dense_layout(destination, source):
            if run is not None:
                merged.append(_flat(run))
                run = None
            merged.append((destination, source))
            continue
        gap = _gap_behind(run, destination, source)
        if run is not None and gap is not None:
            run.numel += gap + destination.numel()
            continue
        if run is not None:
            merged.append(_flat(run))
        run = _CopyRun(destination, source, destination.numel())
    if run is not None:
        merged.append(_flat(run))
    return merged


def _same_dense_layout(destination: Tensor, source: Tensor) -> bool:
    return (
        destination.dtype == source.dtype
        and destination.stride() == source.stride()
        and is_dense(source.shape, source.stride())
    )


def _gap_behind(run: _CopyRun | None, destination: Tensor, source: Tensor) -> int | None:
    """Padding elements between the run's end and these tensors, None where they differ on the two sides."""
    if run is None or run.source.dtype != source.dtype:
        return None
    gap = _gap(run.destination, destination, run.numel)
    if gap != _gap(run.source, source, run.numel):
        return None
    return gap if gap == 0 or destination.untyped_storage() in _padded else None


def _gap(first: Tensor, following: Tensor, numel: int) -> int | None:
    if first.untyped_storage().data_ptr() != following.untyped_storage().data_ptr():
        return None
    gap = int(following.storage_offset() - first.storage_offset() - numel)
    return gap if 0 <= gap * first.itemsize < ALIGNMENT else None


def _flat(run: _CopyRun) -> tuple[Tensor, Tensor]:
    return (
        run.destination.as_strided((run.numel,), (1,), run.destination.storage_offset()),
        run.source.as_strided((run.numel,), (1,), run.source.storage_offset()),
    )


def _steps(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Callable[[], object]]:
    """With a GPU on either side one call a pair of dtypes. On the CPU plain copies in threads, the others by torch."""
    if any(tensor.device.type != "cpu" for pair in pairs for tensor in pair):
        return [
            partial(torch._foreach_copy_, destinations, sources, non_blocking=True)
            for destinations, sources in by_dtypes(pairs)
        ]
    in_pieces = [(into, out_of) for into, out_of in pairs if _is_plain_and_small(into, out_of)]
    whole = [(into, out_of) for into, out_of in pairs if not _is_plain_and_small(into, out_of)]
    steps: list[Callable[[], object]] = [partial(into.copy_, out_of) for into, out_of in whole]
    return [*steps, ThreadedCopy(in_pieces)] if in_pieces else steps


def by_dtypes(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Portion]:
    """The destinations and sources of each pair of dtypes: a list that mixes them is no fused copy."""
    groups: defaultdict[tuple[torch.dtype, torch.dtype], Portion] = defaultdict(lambda: ([], []))
    for into, out_of in pairs:
        destinations, sources = groups[into.dtype, out_of.dtype]
        destinations.append(into)
        sources.append(out_of)
    return iter(groups.values())


def _is_plain_and_small(into: Tensor, out_of: Tensor) -> bool:
    plain = into.dtype == out_of.dtype and into.is_contiguous() and out_of.is_contiguous()
    return plain and into.nbytes < LARGE_RUN_BYTES


class ThreadedCopy:
    """Copies contiguous CPU tensors: each thread takes the next portion as soon as it is done with one.

    The caller copies as well, so that a helper that finds no core costs nothing.
    """

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        total = sum(into.nbytes for into, _ in pairs)
        self.threads = max(1, min(torch.get_num_threads(), MAX_THREADS, total // BYTES_WORTH_A_THREAD))
        self.portions = list(_portions(piece for pair in pairs for piece in _pieces(*pair)))

    def __call__(self) -> None:
        left = iter(self.portions)  # of a list: taking the next is one step of the interpreter
        helping = [_helpers().submit(_copy_all, left) for _ in range(self.threads - 1)]
        _copy_all(left)
        for helper in helping:
            if not helper.cancel():  # one that never got a core has nothing left to do
                helper.result()


def _copy_all(portions: Iterator[Portion]) -> None:
    with torch.no_grad():  # is a thread's own matter
        for destinations, sources in portions:
            torch._foreach_copy_(destinations, sources)


def _pieces(into: Tensor, out_of: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both as 64-bit words where they can be, in pieces that torch does not share out to its threads."""
    into, out_of = into.reshape(-1).view(torch.uint8), out_of.reshape(-1).view(torch.uint8)
    aligned = all(number % 8 == 0 for one in (into, out_of) for number in (one.data_ptr(), one.storage_offset()))
    words = into.numel() // 8 * 8 if aligned else 0
    if words:
        cut = [torch.split(one[:words].view(torch.int64), PIECE_ELEMENTS) for one in (into, out_of)]
        yield from zip(*cut, strict=True)
    if words < into.numel():
        rest = [torch.split(one[words:], PIECE_ELEMENTS) for one in (into, out_of)]
        yield from zip(*rest, strict=True)


def _portions(pieces: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Portion]:
    destinations: list[Tensor] = []
    sources: list[Tensor] = []
    nbytes = 0
    for into, out_of in pieces:
        destinations.append(into)
        sources.append(out_of)
        nbytes += into.nbytes
        if nbytes >= PORTION_BYTES:
            yield destinations, sources
            destinations, sources, nbytes = [], [], 0
    if destinations:
        yield destinations, sources


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="async-grpo-ipc-copy")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork
