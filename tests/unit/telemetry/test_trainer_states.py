"""The states of a run's steps, as a server writes them and a worker reads them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.errors import BadFileError
from async_grpo.status.render import _node
from async_grpo.telemetry.nodes_file import NodeRecord, NodesRecord, read_nodes, write_nodes
from async_grpo.telemetry.trainer_states import StateReader, StateWriter


def write(path: Path, begins: int, *steps: int) -> list[dict[str, Any]]:
    """What a server writes that goes so far; each step has logged one entry when the next begins."""
    writer, log = StateWriter(path), [{"step": step} for step in range(1, begins + 1)]
    writer.begins(begins)
    for step in steps:
        writer.step(step, {"level": step}, log)
        log.append({"step": step + 1, "loss": 0.1 + 0.2})
    writer.close()
    return log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "states.jsonl"


def written(path: Path, fields: dict[str, Any], logged: dict[str, Any]) -> Any:
    """What a worker reads of a step with these fields, before which this was logged."""
    writer = StateWriter(path)
    writer.begins(0)
    writer.step(0, fields, [logged])
    return StateReader(path).at(0)


def test_the_log_is_cut_at_the_step_and_exact(path: Path) -> None:
    reader = StateReader(path)
    assert reader.at(0) is None
    log = write(path, 0, 0, 1, 2)
    for step in (2, 0, 1):
        found = reader.at(step)
        assert (found.fields, found.log) == ({"level": step}, log[:step])
    assert reader.at(3) is None, "it will come"


def test_values_that_json_does_not_know(path: Path) -> None:
    logged = {"loss": math.nan, "most": math.inf, "numpy": np.float32(0.5), "path": Path("a"), "each": np.ones(2)}
    found = written(path, {}, logged)
    assert math.isnan(found.log[0].pop("loss"))
    assert found.log == [{"most": math.inf, "numpy": 0.5, "path": "a", "each": [1.0, 1.0]}]


@pytest.mark.parametrize("several", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0])])
def test_a_callback_may_log_several_numbers(several: object, path: Path) -> None:
    found = written(path, {"mine": several}, {"each": several})
    assert (found.fields, found.log) == ({"mine": [1.0, 2.0]}, [{"each": [1.0, 2.0]}])


def test_a_resumed_run_writes_its_steps_again(path: Path) -> None:
    reader = StateReader(path)
    write(path, 0, 0, 1, 2, 3)
    assert reader.at(3) is not None
    write(path, 2, 2)
    assert [entry["step"] for entry in reader.at(2).log] == [1, 2]
    assert reader.at(3) is None, "this server comes to it"


@pytest.mark.parametrize(("step", "nearest"), [(6, 3), (1, 2)])
def test_a_step_that_no_server_comes_to_is_not_waited_for(step: int, nearest: int, path: Path) -> None:
    """A worker may outlive the server that had issued its job, and the next one may need that worker to go on."""
    write(path, 0, 0, 1)
    write(path, 2, 2, 3)
    assert StateReader(path).at(step).fields == {"level": nearest}


def test_an_evaluation_takes_what_is_there(path: Path) -> None:
    assert StateReader(path).newest(4) is None
    write(path, 0, 0, 1)
    assert StateReader(path).newest(2).fields == {"level": 1}


@pytest.mark.parametrize("line", ["[]", '{"step": "a", "state": {}}', '{"step": 1}', '{"logged": 3}', "{"])
def test_what_is_not_ours_is_refused(line: str, path: Path) -> None:
    path.write_text(line + "\n")
    with pytest.raises(BadFileError):
        StateReader(path).at(1)


# --- `nodes.json`: -----------------------------------------------------------------------------------------------

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
