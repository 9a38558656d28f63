"""Lines as they are written, holes in a file, records of another shape. What is no record at all: `test_bad_files`."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from async_grpo import rundir
from async_grpo.errors import BadFileError
from async_grpo.rundir.reading import MAX_LINE_BYTES, LineReader, read_end, read_object
from async_grpo.rundir.shape import shaped

HUGE = 6 << 30


def test_of_a_huge_file_the_end_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    os.truncate(path, HUGE)
    assert len(read_end(path, 100)[0]) == 100


def test_lines_come_as_they_are_written_and_a_huge_one_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    reader = LineReader(path)
    assert list(reader.new_lines()) == []
    path.write_bytes(b"one\n\xff\ntw")
    assert list(reader.new_lines()) == ["one", "�"]
    assert list(reader.new_lines(half=True)) == ["tw"]
    with path.open("ab") as file:
        file.write(b"o\n")
        file.truncate(file.tell() + 20 * MAX_LINE_BYTES)  # a hole: zero bytes, as a power cut leaves them
    tracemalloc.start()
    try:
        two, hole = reader.new_lines()
        assert list(reader.new_lines()) == []
        assert tracemalloc.get_traced_memory()[1] < 5 * MAX_LINE_BYTES
    finally:
        tracemalloc.stop()
    assert two == "two" and len(hole) < 300
    with path.open("ab") as file:
        file.write(b"the end of the hole\nthree\n")
    assert list(reader.new_lines()) == ["three"]
    path.write_bytes(b"new\n")
    assert list(reader.new_lines()) == ["new"]


class Point(NamedTuple):
    x: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str
    count: int = 0
    rate: float = 0.0
    is_on: bool = False
    seed: int | None = None
    seqs: list[int] = field(default_factory=list)
    points: tuple[Point, ...] = ()
    spent: dict[str, float] = field(default_factory=dict)
    note: Any = None


def test_a_record_is_read_as_it_is_declared(tmp_path: Path) -> None:
    written = {"name": "é", "count": 3, "rate": 1, "seed": 4, "seqs": [1], "points": [[1, 2.5]], "spent": {"a": 1.0}}
    (tmp_path / "r.json").write_text(json.dumps(written))
    assert shaped(Record, read_object(tmp_path / "r.json")) == Record(
        name="é", count=3, rate=1.0, seed=4, seqs=[1], points=(Point(1, 2.5),), spent={"a": 1.0}
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": 3}, "name is 3, not text"),
        ({"name": "a\0b"}, "name holds a zero byte"),
        ({"name": "\ud800"}, "name holds half a character"),
        ({"count": "3"}, 'count is "3", not an integer of 64 bits'),
        ({"count": True}, "count is true, not an integer"),
        ({"count": 2**63}, "count is a larger integer, not"),
        ({"count": 1.0}, "count is 1.0, not an integer"),
        ({"rate": float("nan")}, "rate is NaN, not a finite number"),
        ({"rate": 10**400}, "rate is a larger integer"),
        ({"is_on": 1}, "is_on is 1, not true or false"),
        ({"seed": "x"}, 'seed is "x", not null'),
        ({"seqs": {}}, "seqs is an object, not a list"),
        ({"seqs": [1, None]}, "an item of seqs is null"),
        ({"points": [[1]]}, "an item of points has 1 items, not 2"),
        ({"points": [[1, []]]}, r"an item of points\.at is a list"),
        ({"spent": {"a": "b"}}, r"spent\['a'\] is \"b\""),
        ({"colour": 1}, "it has an unknown field 'colour'"),
    ],
)
def test_a_field_of_another_shape_is_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadFileError, match=reason):
        shaped(Record, {"name": "x", **changes})
    with pytest.raises(BadFileError, match="it has no field 'name'"):
        shaped(Record, {})


SOURCES = Path(rundir.__file__).parents[1]
OF_MANY_RUNS = SOURCES.with_name("async_grpo_experiments")
MAY_OPEN = {  # what opens files otherwise: these are ours, the kernel's, or named by the user on the command line
    "rundir/reading.py": "the one module",
    "api/trainer.py": "the script that this process runs",
    "archive/checkpoint_folders.py": "weights, which may be links to another disk: only their digest is taken",
    "checks/differential": "in a temporary folder",
    "checks/doctor/gpu.py": "/proc, and in a temporary folder",
    "cli/compute/init.py": "of the package",
    "checks/doctor/machine.py": "of the package",
    "checks/probe.py": "in a temporary folder",
    "checks/bug_report/stacks.py": "/proc",
    "envs/openenv.py": "the answer of a server that the user names",
    "launch/accelerate_entry.py": "the setup file, which the user names",
    "launch/host_memory.py": "/proc and /sys",
    "nodes/node.py": "/proc",
    "nodes/tree.py": "the setup file's folder, which the user names",
    "reports/rollouts_page.py": "of the package",
    "rewards": "/sys, and files of the package",
    "rollout/endpoint/server.py": "/proc",
    "roles/replay.py": "the weights that it has just written",
    "setup/accelerate_config.py": "named by the user",
    "setup/generated/trl_command.py": "named by the user",
    "setup/grpo_config/values.py": "sources of TRL and transformers, and what the user names",
    "setup/image_files.py": "images of the user's dataset",
    "setup/setup_file.py": "named by the user",
    "slots/ledger.py": "/proc",
    "status/processes.py": "/proc",
    "sweeps/preflight.py": "netrc in the home directory",
}


def test_every_other_file_is_opened_here() -> None:
    """A new `read_text()` of what lies in a run directory would follow links, wait for pipes and have no bound."""
    found = {
        str(path.relative_to(sources))
        for sources in (SOURCES, OF_MANY_RUNS)
        for path in sources.rglob("*.py")
        if re.search(r"\.read_text\(|\.read_bytes\(|\.open\(\"r?b?\"|json\.load\(", path.read_text())
    }
    others = {name for name in found if not MAY_OPEN.keys() & {name, name.partition("/")[0], name.rpartition("/")[0]}}
    assert not others, f"read files with async_grpo.rundir.reading: {sorted(others)}"
    assert "checks/probe.py" in found
