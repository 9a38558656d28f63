"""`nodes.json`: the machines of a run with `--ray`, as the process writes them that claims for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.rundir.files import write_json
from async_grpo.rundir.shape import as_json, read_shaped


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """One machine, and what it has cost so far."""

    name: str = ""
    number: int = 0  # of the worker that it is in the queue, and
    worker: str = ""  # its name, "dev8"
    workers: int = 0  # that it has
    gone: str = ""  # why it is not served now
    gone_s: float = 0.0  # since when, on the monotonic clock
    weights_s: float = 0.0  # of the last version
    weights_bytes: int = 0  # of the last version
    exchange_ms: float = 0.0  # of the last exchange that waited for nothing
    bytes: int = 0  # weights and groups, in all
    deltas: int = 0  # versions that came as differences
    wholes: int = 0
    losses: int = 0  # how often it was lost


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesRecord:
    head: str = ""  # of Ray, HOST:PORT
    nodes: tuple[NodeRecord, ...] = ()

    @property
    def alive(self) -> int:
        return sum(not node.gone for node in self.nodes)

    @property
    def losses(self) -> int:
        return sum(node.losses for node in self.nodes)

    @property
    def bytes(self) -> int:
        return sum(node.bytes for node in self.nodes)

    def metrics(self) -> dict[str, float]:
        """What a step logs: the slowest node counts."""
        served = [node for node in self.nodes if not node.gone]
        return {
            "nodes/alive": len(served),
            "nodes/weights_s": max((node.weights_s for node in served), default=0.0),
            "nodes/weights_bytes": max((node.weights_bytes for node in served), default=0),
            "nodes/exchange_ms": max((node.exchange_ms for node in served), default=0.0),
        }


def write_nodes(path: Path, record: NodesRecord) -> None:
    """Write the file whole."""
    write_json(path, as_json(record))


def all_gone(path: Path, why: str) -> None:
    """Note that nobody serves the machines any more: the process that did has ended, and could not."""
    if (record := read_nodes(path)) is not None:
        now = time.monotonic()
        rows = (row if row.gone else replace(row, gone=why, gone_s=now) for row in record.nodes)
        write_nodes(path, replace(record, nodes=tuple(rows)))


def read_nodes(path: Path) -> NodesRecord | None:
    """The newest record; None where there is none that can be used."""
    return read_shaped(NodesRecord, path)
