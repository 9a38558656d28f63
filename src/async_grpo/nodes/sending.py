"""The server's weights, as pieces that travel to nodes: whole, or as the difference from what a node has.

A version is copied from the slot that the server has published to the host once, for all nodes. The difference is that
of `deltas.delta`, exact to the bit; the whole is the bytes of the slot as they lie there, in buckets.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from async_grpo.deltas.coding import Bytes
from async_grpo.deltas.delta import Weights, digest, encode, pack
from async_grpo.deltas.tensors import as_stored
from async_grpo.nodes.cluster import StoreFullError
from async_grpo_ipc.attachment import Generations
from async_grpo_ipc.errors import IPCError
from async_grpo_ipc.fields import CANARY_BYTES
from async_grpo_ipc.layout import described

if TYPE_CHECKING:
    from async_grpo_ipc.attachment import Lease

BUCKET_BYTES = 512 * 2**20
SMALLEST_BYTES = 2**20  # of a bucket, where the store is full
LEASE_S = 30.0
TRY_DELTA_EVERY = 16  # versions, where the last difference took longer than sending all

Put = Callable[[Bytes], Any]  # into the cluster's store, once for all nodes; returns what a call can be given


class WeightsPiece(NamedTuple):
    """A part of a version: what it is, and its bytes as `Put` returned them."""

    about: dict[str, Any]
    data: Any
    nbytes: int


class _Whole(NamedTuple):
    """A version in the host's memory."""

    version: int
    digest: str
    payload: Bytes  # of its slot
    weights: Weights  # which lie in `payload`


class PublishedVersions:
    """What the server publishes at `handle`, from the moment that it does, ready to be sent. For several threads."""

    def __init__(self, handle: Path, put: Put) -> None:
        self._put, self._handle = put, handle
        self._generations: Generations | None = None
        self._mutex = threading.Lock()  # of `_generations`, held for moments
        self._packing = threading.RLock()  # of what follows, held while a version is copied and encoded
        self._now: _Whole | None = None
        self._static = np.empty(0, np.uint8)  # what does not train
        self._frame: dict[str, Any] = {}  # what the tensors are, for a node that has none yet
        self._differences: dict[int, WeightsPiece] = {}  # by the version that they start from
        self._buckets: dict[tuple[int, str, int], WeightsPiece] = {}  # by version, kind and offset; `about` is empty
        self._most_bytes = BUCKET_BYTES  # of a bucket; less once the store was full
        self._encode_s = 0.0
        self._bytes_per_s = 0.0
        self._taken = 0

    def newest(self) -> int | None:
        """The newest version that the server has published, None before the first."""
        with self._mutex:
            if self._generations is None:
                if not self._handle.exists():
                    return None
                try:
                    self._generations = Generations(self._handle)
                except IPCError:  # what a dead server has left, or a live one is making
                    return None
            found = self._generations.follow().newest()
        return None if found is None else found.version

    def pieces(self, since: int | None) -> Iterator[WeightsPiece]:
        """The newest version for a node that has `since`; None: it has nothing."""
        with self._packing:
            now = self._take_newest()
            steps = self._steps(since, now)
        if steps:
            yield from steps
            return
        if since is None:
            yield from self._in_buckets("static", now.version, self._static, self._frame)
        yield from self._in_buckets("whole", now.version, now.payload, {"digest": now.digest})

    def took(self, nbytes: int, seconds: float) -> None:
        """Remember how fast a whole version went, or a part of one."""
        self._bytes_per_s = nbytes / max(seconds, 1e-6)

    def put_again(self, late: WeightsPiece) -> None:
        """Forget what the store has, unless that was put after a piece that is late: it is on this machine alone."""
        with self._packing:
            if any(kept.data is late.data for kept in (*self._differences.values(), *self._buckets.values())):
                self._differences, self._buckets = {}, {}

    def close(self) -> None:
        if self._generations is not None:
            self._generations.close()

    def _take_newest(self) -> _Whole:
        assert self._generations is not None, "`newest` has said that there is a version"
        with self._mutex:
            lease = self._generations.take_lease(LEASE_S)
        try:
            if self._now is not None and lease.version == self._now.version:
                return self._now
            payload, weights = self._copy(lease)
        finally:
            with self._mutex:
                lease.attachment.end_lease(lease)
        self._now = self._with_difference(lease.version, payload, weights)
        self._buckets = {key: data for key, data in self._buckets.items() if key[0] == lease.version}
        return self._now

    def _copy(self, lease: Lease) -> tuple[Bytes, Weights]:
        handle, blocks = lease.attachment.handle, lease.attachment.memory.blocks
        if not self._frame:
            self._static = _on_the_host(blocks[0])
            frame: dict[str, Any] = {"static": described(handle.static), "slot": described(handle.slot)}
            frame |= {"tied": dict(handle.tied), "complete": handle.complete, "buffers": handle.buffers}
            hashed = digest(as_stored(self._static, handle.static))
            self._frame = {"frame": json.dumps(frame), "digest": hashed}
        payload = _on_the_host(blocks[1 + lease.slot])
        lease.attachment.require_readable()
        return payload, as_stored(payload, handle.slot)

    def _with_difference(self, version: int, payload: Bytes, weights: Weights) -> _Whole:
        """Encode what has changed since the version before, where that has been faster than sending all."""
        before = self._now
        self._taken += 1
        send_s = payload.nbytes / self._bytes_per_s if self._bytes_per_s else float("inf")
        if before is None or (self._encode_s > send_s and self._taken % TRY_DELTA_EVERY):
            return _Whole(version, digest(weights), payload, weights)
        began = time.monotonic()
        delta = encode(before.weights, weights, base=before.digest)
        data = np.frombuffer(b"".join(pack(delta)), np.uint8)
        self._encode_s = time.monotonic() - began
        if len(data) < min(payload.nbytes, BUCKET_BYTES):
            about = {"kind": "delta", "version": version}
            self._differences[before.version] = WeightsPiece(about, self._put(data), len(data))
            self._forget_old(payload.nbytes)
        return _Whole(version, delta.header.result, payload, weights)

    def _forget_old(self, most_bytes: int) -> None:
        """Drop the oldest differences that are together larger than the whole."""
        kept = sum(step.nbytes for step in self._differences.values())
        for version in sorted(self._differences):
            if kept <= most_bytes:
                break
            kept -= self._differences.pop(version).nbytes

    def _steps(self, since: int | None, now: _Whole) -> list[WeightsPiece]:
        """The differences that lead from `since` to now; none where one is missing."""
        steps: list[WeightsPiece] = []
        at = since
        while at is not None and (step := self._differences.get(at)):
            steps.append(step)
            at = step.about["version"]
        return steps if at == now.version else []

    def _in_buckets(self, kind: str, version: int, payload: Bytes, about: dict[str, Any]) -> Iterator[WeightsPiece]:
        about = {**about, "kind": kind, "version": version, "total": payload.nbytes}
        at = 0
        while at < max(1, payload.nbytes):
            with self._packing:
                piece = self._bucket((version, kind, at), payload[at:])
            yield piece._replace(about={**about, "at": at})
            at += max(1, piece.nbytes)

    def _bucket(self, key: tuple[int, str, int], rest: Bytes) -> WeightsPiece:
        """The first bytes of `rest`, in the store. Where that is full, nothing is kept there, and a bucket is smaller.

        Raises:
            StoreFullError: not even a small one fits.
        """
        if key in self._buckets:
            return self._buckets[key]
        while True:
            part = rest[: min(BUCKET_BYTES, self._most_bytes)]
            try:
                piece = WeightsPiece({}, self._put(part), part.nbytes)
                break
            except StoreFullError:
                if self._most_bytes <= SMALLEST_BYTES:
                    raise
                self._buckets, self._differences = {}, {}
                self._most_bytes = max(SMALLEST_BYTES, part.nbytes // 2)
        if self._now is not None and self._now.version == key[0] and self._most_bytes == BUCKET_BYTES:
            self._buckets[key] = piece
        return piece


def _on_the_host(block: torch.Tensor) -> Bytes:
    """A copy of a block's bytes behind its canary."""
    payload = np.empty(block.numel() - CANARY_BYTES, np.uint8)
    torch.from_numpy(payload).copy_(block[CANARY_BYTES:])
    return payload
