"""Copies between two GPUs that cannot reach each other's memory: through two pinned buffers in host memory, in turn.

While one buffer is sent up to the reader's GPU, the other is filled from the owner's. Each GPU does its part in a
stream of its own (`Lane`), in order; marks tell one lane how far the other is.
`tests/unit/ipc/test_ipc_staging.py` runs this with lanes that are as late as they may be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

BUFFER_BYTES = 16 << 20


class Lane(Protocol):
    """A stream: what it is given happens later, in this order."""

    def copy(self, into: Tensor, out_of: Tensor) -> None: ...

    def mark(self) -> Any:
        """Something that another lane can wait for: everything given so far has happened."""
        ...

    def wait(self, mark: Any) -> None:
        """What is given from now on happens after this mark of another lane."""
        ...

    def begin(self) -> None:
        """What is given from now on happens after all that this process has given the GPU so far."""
        ...

    def finish(self) -> None:
        """Return when everything has happened."""
        ...


@dataclass(frozen=True, slots=True)
class Staging:
    """Two buffers of equal size in host memory, and the lanes of the two GPUs."""

    buffers: tuple[Tensor, Tensor]  # uint8, pinned
    down: Lane  # of the owner's GPU
    up: Lane  # of the reader's GPU

    def copy(self, chunks: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy each source into its destination, both uint8 and no longer than a buffer. Done when it returns."""
        self.down.begin()
        self.up.begin()
        sent: list[Any] = [None, None]
        for index, (into, out_of) in enumerate(chunks):
            turn = index % 2
            buffer = self.buffers[turn][: out_of.numel()]
            if sent[turn] is not None:
                self.down.wait(sent[turn])  # before it may be filled again
            self.down.copy(buffer, out_of)
            self.up.wait(self.down.mark())
            self.up.copy(into, buffer)
            sent[turn] = self.up.mark()
        self.up.finish()


def staged_steps(pairs: Sequence[tuple[Tensor, Tensor]], staging: Staging) -> list[Callable[[], object]]:
    """What copies these pairs through `staging`; casts and odd strides go through ordinary host memory instead."""
    plain = [pair for pair in pairs if _is_plain(*pair)]
    others = [pair for pair in pairs if not _is_plain(*pair)]
    chunks = [chunk for pair in plain for chunk in _chunks(*pair, staging.buffers[0].numel())]
    steps: list[Callable[[], object]] = [partial(_by_way_of_the_host, into, out_of) for into, out_of in others]
    return [*steps, partial(staging.copy, chunks)] if chunks else steps


def _is_plain(into: Tensor, out_of: Tensor) -> bool:
    return into.dtype == out_of.dtype and into.is_contiguous() and out_of.is_contiguous()


def _by_way_of_the_host(into: Tensor, out_of: Tensor) -> None:
    into.copy_(out_of.cpu())


def _chunks(into: Tensor, out_of: Tensor, nbytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    cut = [torch.split(one.reshape(-1).view(torch.uint8), nbytes) for one in (into, out_of)]
    yield from zip(*cut, strict=True)


class CudaLane:
    """A stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it

    def copy(self, into: Tensor, out_of: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(out_of, non_blocking=True)

    def mark(self) -> Any:
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        self._stream.synchronize()


def cuda_staging(owner: torch.device, reader: torch.device) -> Staging:
    first, second = (torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2))
    return Staging((first, second), CudaLane(owner), CudaLane(reader))
