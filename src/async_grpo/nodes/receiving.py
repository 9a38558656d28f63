"""The weights of a node: pieces that arrive become versions that its workers map.

They are written where workers will read them, and a version is published only when its hash is the one that was sent:
a transfer that ends in the middle publishes nothing.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from async_grpo.deltas.coding import Bytes, DeltaError
from async_grpo.deltas.delta import apply, digest, read
from async_grpo.deltas.tensors import as_stored
from async_grpo_ipc import WeightExporter
from async_grpo_ipc.control import MAX_SLOTS
from async_grpo_ipc.fields import CANARY_BYTES
from async_grpo_ipc.layout import Layout, TensorSpec, read_layout, views
from async_grpo_ipc.sources import Sources

MIN_SLOTS = 3  # one that is being read, the newest, and one to write into
EXTRA_BYTES = 256 * 2**20  # that further slots may take, one for each worker
FREE_SLOT_S = 0.5  # how long a version waits here for a slot that nobody reads
POLL_S = 0.005


class _NoSlot(Exception):
    """Workers read every slot but the newest."""


class ReceivedWeights:
    """The versions of one node, published at `handle`. For the thread that calls `receive`.

    Args:
        workers: of the node, each of which may read another version.
    """

    def __init__(self, handle: Path, workers: int) -> None:
        self._handle, self._workers = handle, workers
        self._exporter: WeightExporter | None = None
        self._slot: Layout
        self._digest = ""  # of the newest version
        self._arriving: Generator[None, Bytes, None] | None = None  # takes the buckets of one whole
        self._arrived = 0  # bytes

    @property
    def published(self) -> int | None:
        """The newest version that workers can see."""
        return None if self._exporter is None else self._exporter.version

    def receive(self, about: Mapping[str, Any], data: Bytes) -> dict[str, Any]:
        """Take a piece. Returns what workers can see then.

        `why`: all must be sent again; `busy`: this piece must, as workers read every slot.
        """
        why, busy = "", False
        try:
            if about["kind"] == "delta":
                self._apply(int(about["version"]), data)
            else:
                self._take_bucket(about, data)
        except _NoSlot:
            self._arriving, busy = None, True
        except DeltaError as error:
            self._forget()
            self._digest, why = "", str(error)
        return {"published": self.published, "why": why, "busy": busy}

    def close(self) -> None:
        self._forget()
        if self._exporter is not None:
            self._exporter.close()

    def _take_bucket(self, about: Mapping[str, Any], data: Bytes) -> None:
        if about["at"] == 0:
            self._forget()
            self._arriving, self._arrived = self._static(about) if about["kind"] == "static" else self._whole(about), 0
            next(self._arriving)
        if self._arriving is None or about["at"] != self._arrived:
            raise DeltaError(f"A part of version {about['version']} is missing: {about['at']} after {self._arrived}.")
        self._arrived += len(data)
        try:
            self._arriving.send(data)
        except StopIteration:
            self._arriving = None

    def _forget(self) -> None:
        """Leave what has begun to arrive."""
        if self._arriving is not None:
            self._arriving.close()
        self._arriving = None

    def _whole(self, about: Mapping[str, Any]) -> Generator[None, Bytes, None]:
        if self._exporter is None:
            raise DeltaError("What the tensors are was not sent.")
        version = int(about["version"])
        with self._free_slot(version) as payload:
            yield from _filling(payload, about)
            _require(digest(as_stored(payload, self._slot)), about["digest"], f"Version {version}")
        self._digest = about["digest"]

    def _static(self, about: Mapping[str, Any]) -> Generator[None, Bytes, None]:
        """What does not train, and with it what the tensors are."""
        frame = json.loads(about["frame"])
        layout = read_layout(frame["static"])
        block = np.empty(layout.nbytes, np.uint8)
        yield from _filling(block[CANARY_BYTES:], about)
        _require(digest(as_stored(block[CANARY_BYTES:], layout)), about["digest"], "What does not train")
        if self._exporter is None:
            self._slot = read_layout(frame["slot"])
            self._exporter = self._open(frame, layout, views(torch.from_numpy(block), layout.tensors))

    def _apply(self, version: int, data: Bytes) -> None:
        if self._exporter is None or not self._digest:
            raise DeltaError("There is no version here to start from.")
        with os.fdopen(os.memfd_create("delta"), "wb", buffering=0) as file:
            file.write(data.data)
            delta = read(file.fileno())
        before = self._exporter.payload().numpy()
        with self._free_slot(version) as payload:
            payload[:] = before
            apply(delta, as_stored(payload, self._slot), known=self._digest)
        self._digest = delta.header.result

    @contextmanager
    def _free_slot(self, version: int) -> Iterator[Bytes]:
        """The bytes of a slot, which are published at the end of the block."""
        assert self._exporter is not None
        deadline = time.monotonic() + FREE_SLOT_S
        while True:
            with self._exporter.writing(version) as slot:
                if slot is not None:
                    yield self._exporter.payload(slot).numpy()
                    return
            if time.monotonic() > deadline:
                raise _NoSlot
            time.sleep(POLL_S)

    def _open(self, frame: Mapping[str, Any], layout: Layout, static: dict[str, Tensor]) -> WeightExporter:
        def write(destinations: Mapping[str, Tensor]) -> None:
            for name, destination in destinations.items():
                destination.copy_(static.pop(name))  # with the last one their memory goes

        sources = Sources(
            changing={spec.name: _shape_of(spec) for spec in self._slot.tensors},
            static={spec.name: _shape_of(spec) for spec in layout.tensors},
            tied=dict(frame["tied"]),
            complete=bool(frame["complete"]),
            buffers=bool(frame["buffers"]),
            write=write,
            written_on=torch.device("cpu"),
        )
        extra = min(self._workers - 1, EXTRA_BYTES // max(1, self._slot.payload_bytes))
        return WeightExporter(sources, self._handle, min(MIN_SLOTS + extra, MAX_SLOTS))


def _filling(target: Bytes, about: Mapping[str, Any]) -> Generator[None, Bytes, None]:
    """Take buckets until the target is full."""
    if about["total"] != len(target):
        raise DeltaError(f"{about['total']:,} bytes are sent, and the tensors have {len(target):,}.")
    at = 0
    while True:
        data = yield
        target[at : at + len(data)] = data
        at += len(data)
        if at >= len(target):
            return


def _require(found: str, expected: str, what: str) -> None:
    if found != expected:
        raise DeltaError(f"{what} has the hash {found} instead of {expected}.")


def _shape_of(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
