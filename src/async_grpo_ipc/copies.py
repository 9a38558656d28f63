"""Copies of many tensors at the speed of one.

A copy of 400 small tensors is bound by the cost of 400 calls, not by memory. So neighbours that lie the same
way in source and destination are copied as one run (all of them, after `flatten_parameters`), small runs on
the CPU go through numpy, whose calls cost a third of torch's, and runs on a GPU go in one fused kernel.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from async_grpo_ipc.layout import ALIGNMENT, is_dense

SMALL_RUN_BYTES = 1 << 20  # above this, torch's parallel copy is faster than numpy's


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
        self._steps = list(_steps(_merge_neighbours(pairs)))

    def is_fresh(self) -> bool:
        """Whether no movable tensor has gone to other memory since (`model.to(...)`, `param.data = ...`)."""
        return _addresses(self._movable) == self._addresses

    def run(self) -> None:
        for step in self._steps:
            step()


def _addresses(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


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


def _steps(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterable[Callable[[], object]]:
    """On the CPU one call a run; with a GPU on either side one call for all."""
    if any(tensor.device.type != "cpu" for pair in pairs for tensor in pair):
        destinations, sources = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        yield lambda: torch._foreach_copy_(destinations, sources, non_blocking=True)
        return
    for destination, source in pairs:
        if destination.dim() == 1 and destination.dtype == source.dtype and destination.nbytes < SMALL_RUN_BYTES:
            yield _numpy_copy(destination, source)
        else:
            yield _torch_copy(destination, source)


def _numpy_copy(destination: Tensor, source: Tensor) -> Callable[[], object]:
    if not (destination.is_contiguous() and source.is_contiguous()):
        return _torch_copy(destination, source)
    into, out_of = destination.view(torch.uint8).numpy(), source.view(torch.uint8).numpy()
    return lambda: np.copyto(into, out_of)


def _torch_copy(destination: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: destination.copy_(source)
