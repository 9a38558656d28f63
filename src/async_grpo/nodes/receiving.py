"""The weights of a node: pieces that arrive become versions that its workers map.

A version is published only when its hash is the one that was sent, so a transfer that ends in the middle publishes
nothing.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from async_grpo_ipc import WeightExporter
from async_grpo_ipc.control import MAX_SLOTS
from async_grpo_ipc.delta import Buffer, DeltaError, apply, digest
from async_grpo_ipc.delta.file import read
from async_grpo_ipc.delta.tensors import NAME_OF, as_tensor
from async_grpo_ipc.layout import Layout, TensorSpec, read_layout
from async_grpo_ipc.sources import Sources

MIN_SLOTS = 3  # one that is being read, the newest, and one to write into
EXTRA_BYTES = 256 * 2**20  # that further slots may take, one for each worker
FREE_SLOT_S = 0.5  # how long a version waits here for a slot that nobody reads
POLL_S = 0.005

Bytes = NDArray[np.uint8]


class ReceivedWeights:
    """The versions of one node, published at `handle`. For the thread that calls `receive`.

    Args:
        workers: of the node, each of which may read another version.
    """

    def __init__(self, handle: Path, workers: int) -> None:
        self._handle, self._workers = handle, workers
        self._exporter: WeightExporter | None = None
        self._frame: dict[str, Any] = {}
        self._slot: Layout
        self._static: dict[str, Buffer] = {}
        self._buffers: dict[str, Buffer] = {}  # of `has`
        self._digest = ""
        self.has: int | None = None  # the version that is here, published or not
        self._arriving: dict[str, Buffer] = {}
        self._arrived = 0  # bytes

    @property
    def published(self) -> int | None:
        """The newest version that workers can see."""
        return None if self._exporter is None else self._exporter.version

    def receive(self, about: Mapping[str, Any], data: Bytes) -> dict[str, Any]:
        """Take a piece. Returns what is here and published now; `why`: the whole version must be sent."""
        try:
            if about["kind"] == "whole":
                self._take_bucket(about, data)
            elif about["kind"] == "delta":
                self._apply(int(about["version"]), data)
        except DeltaError as error:
            self.has, self._buffers, self._arriving = None, {}, {}
            return {"has": None, "published": self.published, "why": str(error)}
        self._publish()
        return {"has": self.has, "published": self.published, "why": ""}

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def _take_bucket(self, about: Mapping[str, Any], data: Bytes) -> None:
        if about["at"] == 0:
            self._begin(about)
        if about["at"] != self._arrived or not self._arriving:
            raise DeltaError(f"A part of version {about['version']} is missing: {about['at']} after {self._arrived}.")
        at = 0
        for buffer in self._arriving.values():
            first, last = max(self._arrived, at), min(self._arrived + len(data), at + buffer.nbytes)
            if first < last:
                buffer.data[first - at : last - at] = data[first - self._arrived : last - self._arrived]
            at += buffer.nbytes
        self._arrived += len(data)
        if self._arrived == about["total"]:
            self._finish(int(about["version"]), about["digest"])

    def _begin(self, about: Mapping[str, Any]) -> None:
        if about.get("frame"):
            self._frame = json.loads(about["frame"])
            self._slot = read_layout(self._frame["slot"])
        if not self._frame:
            raise DeltaError("What the tensors are was not sent.")
        static = read_layout(self._frame["static"]).tensors if about.get("frame") else ()
        wanted = [*_by_name(static), *_by_name(self._slot.tensors)]
        self._arriving = {spec.name: _empty(spec) for spec in wanted}
        self._arrived = 0

    def _finish(self, version: int, expected: str) -> None:
        arrived, self._arriving = self._arriving, {}
        names = {spec.name for spec in self._slot.tensors}
        changing = {name: buffer for name, buffer in arrived.items() if name in names}
        static = {name: buffer for name, buffer in arrived.items() if name not in names}
        found = digest(changing)
        if found != expected:
            raise DeltaError(f"Version {version} has the hash {found} instead of {expected}.")
        if self._exporter is None and digest(static) != self._frame["static_digest"]:
            raise DeltaError("The weights that do not change have another hash than they had.")
        self._static = static
        self._buffers, self._digest, self.has = changing, found, version

    def _apply(self, version: int, data: Bytes) -> None:
        if self.has is None:
            raise DeltaError("There is no version here to start from.")
        delta, _ = read(io.BytesIO(data.tobytes()))
        self._buffers = apply(delta, self._buffers, in_place=True, known=self._digest)
        self._digest, self.has = delta.result, version

    def _publish(self) -> None:
        """Let workers see what is here. They may read every slot: then the next call tries again."""
        if self.has is None or self._arriving:
            return
        if self._exporter is None:
            self._exporter = self._open()
        deadline = time.monotonic() + FREE_SLOT_S
        while self.has != self._exporter.version and not self._exporter.publish(self.has):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)

    def _open(self) -> WeightExporter:
        static = read_layout(self._frame["static"])
        sources = Sources(
            changing={spec.name: _shape_of(spec) for spec in self._slot.tensors},
            static={spec.name: _shape_of(spec) for spec in static.tensors},
            tied=dict(self._frame["tied"]),
            complete=bool(self._frame["complete"]),
            buffers=bool(self._frame["buffers"]),
            write=self._write,
            written_on=torch.device("cpu"),
        )
        extra = min(self._workers - 1, EXTRA_BYTES // max(1, self._slot.payload_bytes))
        exporter = WeightExporter(sources, self._handle, min(MIN_SLOTS + extra, MAX_SLOTS))
        self._static = {}
        return exporter

    def _write(self, destinations: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, destination in destinations.items():
                destination.copy_(as_tensor(self._buffers.get(name) or self._static[name]))


def _by_name(specs: tuple[TensorSpec, ...]) -> list[TensorSpec]:
    return sorted(specs, key=lambda spec: spec.name)


def _empty(spec: TensorSpec) -> Buffer:
    return Buffer(NAME_OF[spec.dtype], spec.shape, np.empty(spec.nbytes, np.uint8))


def _shape_of(spec: TensorSpec) -> Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="meta")
