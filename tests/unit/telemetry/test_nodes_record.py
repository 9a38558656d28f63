"""`nodes.json`: what is written is read, and what is no record is none."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from async_grpo.status.render import _node
from async_grpo.telemetry.nodes_file import NodeRecord, NodesRecord, read_nodes, write_nodes

SERVED = {"weights_s": 0.4, "weights_bytes": 9_000_000, "exchange_ms": 1.5, "bytes": 100, "deltas": 41, "wholes": 1}
NODES = NodesRecord(
    nodes=(
        NodeRecord(name="gpu2", number=8, worker="dev8", workers=8, losses=2, **SERVED),
        NodeRecord(name="gpu3", number=9, worker="dev9", gone="has not answered for 10 s", losses=1, bytes=5),
    )
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_nodes(tmp_path / "nodes.json", NODES)
    assert read_nodes(tmp_path / "nodes.json") == NODES
    assert (NODES.alive, NODES.losses, NODES.bytes) == (1, 3, 105)


@pytest.mark.parametrize("text", ["", "[]", '{"nodes": 3}', '{"nodes": [{"workers": "many"}]}'])
def test_what_is_no_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "nodes.json").write_text(text)
    assert read_nodes(tmp_path / "nodes.json") is None


def test_a_step_logs_the_slowest_node_that_is_served() -> None:
    expected = {"nodes/alive": 1, "nodes/weights_s": 0.4, "nodes/weights_bytes": 9_000_000, "nodes/exchange_ms": 1.5}
    assert NODES.metrics() == expected
    assert NodesRecord().metrics()["nodes/alive"] == 0


def test_a_line_of_status() -> None:
    served, gone = NODES.nodes
    assert _node(served).plain == "gpu2 (dev8): 8 workers, weights 9.0 MB a version (delta), 0.4 s"
    gone.gone_s = time.monotonic() - 12
    said = _node(gone).plain
    assert said == "gpu3 (dev9) gone since 12 s: has not answered for 10 s. It joins again when it is back"
