"""Copies of many tensors at the speed of one.

A copy of 400 small tensors is bound by the cost of 400 calls, not by memory. So:

* neighbours that lie the same way in source and destination are copied as one run (after `flatten_parameters`: all);
* on the CPU, runs of less than 16 MB are memcpys by numpy, whose calls cost a third of torch's, shared out to a few
  threads. (torch's own threads meet at a barrier after each tensor: many times slower as soon as others compute, too.);
* with a GPU, one fused kernel copies all.
"""

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from async_grpo_ipc.layout import ALIGNMENT, is_dense

MAX_THREADS = 8  # what it takes to fill a server's memory bus
BYTES_WORTH_A_THREAD = 4 << 20
LARGE_RUN_BYTES = 16 << 20  # from here on one barrier more or less does not matter

Bytes = npt.NDArray[np.uint8]

_padded: "weakref.WeakSet[torch.UntypedStorage]" = weakref.WeakSet()


def allow_merging_over_padding(block: Tensor) -> None:
    """Say that the bytes between neighbouring tensors of this block mean nothing, so that copies may
    overwrite them.
    """
    _padded.add(block.untyped_storage())


class CopyPlan:
    """A prepared copy of each source into its destination. Run it as often as the `movable` side keeps its
    place.
    """

    def __init__(self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, movable: Sequence[Tensor]) -> None:
        self._movable = movable
        self._addresses = _addresses(movable)
        pairs = [(d.detach(), s.detach()) for d, s in zip(destinations, sources, strict=True) if d.numel()]
        self._steps = _steps(_merge_neighbours(pairs))

    def is_fresh(self) -> bool:
        """Whether no movable tensor has gone to other memory since (`model.to(...)`, `param.data = ...`)."""
        return _addresses(self._movable) == self._addresses

    def run(self) -> None:
        for step in self._steps:
            step()


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))  # with every publish and pull: a map is twice as fast as a loop


@dataclass(slots=True)
class _Run:
    """Elements that lie one after the other in both tensors' storages."""

    destination: Tensor
    source: Tensor
    numel: int


def _merge_neighbours(pairs: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    merged: list[tuple[Tensor, Tensor]] = []
    run: _Run | None = None
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
        run = _Run(destination, source, destination.numel())
    if run is not None:
        merged.append(_flat(run))
    return merged


def _same_dense_layout(destination: Tensor, source: Tensor) -> bool:
    return (
        destination.dtype == source.dtype
        and destination.stride() == source.stride()
        and is_dense(source.shape, source.stride())
    )


def _gap_behind(run: _Run | None, destination: Tensor, source: Tensor) -> int | None:
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


def _flat(run: _Run) -> tuple[Tensor, Tensor]:
    return (
        run.destination.as_strided((run.numel,), (1,), run.destination.storage_offset()),
        run.source.as_strided((run.numel,), (1,), run.source.storage_offset()),
    )


def _steps(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Callable[[], object]]:
    """With a GPU on either side one call. On the CPU plain copies in threads, casts and odd strides by torch."""
    if any(tensor.device.type != "cpu" for pair in pairs for tensor in pair):
        destinations, sources = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        return [lambda: torch._foreach_copy_(destinations, sources, non_blocking=True)]
    by_memcpy = [(into, out_of) for into, out_of in pairs if _is_small_and_plain(into, out_of)]
    by_torch = [(into, out_of) for into, out_of in pairs if not _is_small_and_plain(into, out_of)]
    steps: list[Callable[[], object]] = [partial(into.copy_, out_of) for into, out_of in by_torch]
    return [*steps, ThreadedCopy(by_memcpy)] if by_memcpy else steps


def _is_small_and_plain(into: Tensor, out_of: Tensor) -> bool:
    plain = into.dtype == out_of.dtype and into.is_contiguous() and out_of.is_contiguous()
    return plain and into.nbytes < LARGE_RUN_BYTES


class ThreadedCopy:
    """Copies contiguous CPU tensors with one thread a share of the bytes."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        pieces = [(_bytes_of(into), _bytes_of(out_of)) for into, out_of in pairs]
        total = sum(into.size for into, _ in pieces)
        threads = max(1, min(torch.get_num_threads(), MAX_THREADS, total // BYTES_WORTH_A_THREAD))
        self.shares = list(_cut(pieces, -(-total // threads)))

    def __call__(self) -> None:
        mine, *others = self.shares
        started = [_helpers().submit(_copy_all, share) for share in others]
        _copy_all(mine)
        for other in started:
            other.result()


def _copy_all(share: Sequence[tuple[Bytes, Bytes]]) -> None:
    for into, out_of in share:
        np.copyto(into, out_of)  # a memcpy, without the interpreter's lock


def _cut(pieces: Iterable[tuple[Bytes, Bytes]], share_bytes: int) -> Iterator[list[tuple[Bytes, Bytes]]]:
    """Shares of equal size, in order; a piece that crosses a boundary is cut there."""
    share: list[tuple[Bytes, Bytes]] = []
    room = share_bytes
    for into, out_of in pieces:
        while into.size >= room:
            share.append((into[:room], out_of[:room]))
            yield share
            into, out_of, share, room = into[room:], out_of[room:], [], share_bytes
        if into.size:
            share.append((into, out_of))
            room -= into.size
    if share:
        yield share


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, thread_name_prefix="async-grpo-ipc-copy")


os.register_at_fork(after_in_child=_helpers.cache_clear)  # threads do not survive a fork


def _bytes_of(tensor: Tensor) -> Bytes:
    result: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return result
