"""Files of whole lines, on a full disk and after a cut; JSON files that appear whole; folders that are empty."""

from __future__ import annotations

import errno
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from async_grpo import rundir
from async_grpo.errors import BadFileError, DiskFullError, RunDirError
from async_grpo.records import WorkerId
from async_grpo.rundir import folder_watch
from async_grpo.rundir.files import LineFile, fresh_folder, write_json
from async_grpo.rundir.folder_watch import FolderWatch
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import MAX_LINE_BYTES, LineReader, read_end, read_object
from async_grpo.rundir.shape import shaped
from async_grpo_ipc.errors import HandleFileError
from async_grpo_ipc.handle import replace_whole


class FullDisk:
    """A file with room for this many bytes more, as `write` of a full disk behaves: short, then ENOSPC."""

    def __init__(self, file: Any, room: int, number: int = errno.ENOSPC) -> None:
        self._file, self.room, self._number = file, room, number

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(self._number, "no room")
        written: int = self._file.write(data[: self.room])
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _on_full_disk(path: Path, room: int, number: int = errno.ENOSPC) -> tuple[LineFile, FullDisk]:
    lines = LineFile(path)
    disk = FullDisk(lines._file, room, number)
    lines._file = disk  # type: ignore[assignment]
    return lines, disk


@pytest.mark.parametrize("room", [0, 1, 4, 7])
def test_lines_wait_for_room_and_none_is_half_there(tmp_path: Path, room: int) -> None:
    path = tmp_path / "lines"
    lines, disk = _on_full_disk(path, room)
    for line in ("one", "two", "three"):
        lines.append(line)
    whole = path.read_text()
    assert "one\ntwo\nthree\n".startswith(whole) and (not whole or whole.endswith("\n"))
    with pytest.raises(DiskFullError, match="no room for"):
        lines.sync()
    disk.room = 100
    lines.append("four")
    lines.sync()
    lines.close()
    assert path.read_text() == "one\ntwo\nthree\nfour\n"


def test_closing_on_a_full_disk_is_no_error(tmp_path: Path) -> None:
    lines, _ = _on_full_disk(tmp_path / "lines", 2)
    lines.append("one")
    lines.close()
    assert (tmp_path / "lines").read_text() == ""


def test_other_errors_are_raised(tmp_path: Path) -> None:
    lines, _ = _on_full_disk(tmp_path / "lines", 0, errno.EIO)
    with pytest.raises(OSError, match="no room"):
        lines.append("one")


@pytest.mark.parametrize("left", ["", "one\n", "one\ntw", "on"])
def test_it_goes_on_after_the_last_whole_line(tmp_path: Path, left: str) -> None:
    path = tmp_path / "lines"
    path.write_text(left)
    lines = LineFile(path)
    lines.append("next")
    lines.close()
    lines.close()
    assert path.read_text() == ("one\nnext\n" if left.startswith("one\n") else "next\n")


def test_json_appears_whole_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    for number in range(3):
        write_json(tmp_path / "a.json", {"number": number})
    [path] = tmp_path.iterdir()
    assert (path.name, path.read_text()) == ("a.json", '{\n  "number": 2\n}\n')


def test_a_fresh_folder_has_nothing_of_a_process_that_was_killed_and_is_gone_at_the_end(tmp_path: Path) -> None:
    folder = RunDir(tmp_path).worker_engine(WorkerId(3))
    (folder / "left").mkdir(parents=True)
    (folder / "left" / "config.json").write_text("of the dead")
    with pytest.raises(KeyError), fresh_folder(folder):
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text("{}")
        raise KeyError
    assert not folder.exists()


@pytest.mark.parametrize("write", [lambda path: write_json(path, {}), lambda path: replace_whole(path, b"")])
def test_a_folder_in_the_place_of_a_file_is_named_and_nothing_is_left(tmp_path: Path, write: Any) -> None:
    (tmp_path / "x.json").mkdir()
    with pytest.raises((BadFileError, HandleFileError), match=r"x\.json cannot be written: it is a directory"):
        write(tmp_path / "x.json")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


# --- A run directory that is renamed, deleted, replaced or read-only while the run goes on: ----------------------


def _empty(root: Path) -> None:
    """What `rm -r` comes to where the server makes its lock again meanwhile."""
    (root / "run.json").unlink()


def _replace(root: Path) -> None:
    root.rename(root.with_name("renamed"))
    root.mkdir()


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (lambda root: root.rename(root.with_name("renamed")), "was renamed or deleted while the run was going on"),
        (_empty, "Files of .* were deleted while the run was going on"),
        (_replace, "Another directory has taken the place of"),
    ],
)
def test_what_became_of_the_directory_is_said(tmp_path: Path, happens: Callable[[Path], None], said: str) -> None:
    root = tmp_path / "worker"
    root.mkdir()
    (root / "run.json").write_text("{}")
    watch = FolderWatch(root)
    assert watch.trouble() == ""
    happens(root)
    with pytest.raises(RunDirError, match=said), watch.explained():
        (root / "queue" / "job").read_bytes()


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_watch.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(RunDirError, match="has become read-only"), FolderWatch(tmp_path).explained():
        raise OSError(30, "Read-only file system")


def test_a_file_system_that_only_refuses_to_write_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, flags: int, mode: int) -> int:
        raise OSError(30, "Read-only file system")

    watch = FolderWatch(tmp_path)
    assert watch.trouble() == "" and list(tmp_path.iterdir()) == []
    monkeypatch.setattr(folder_watch.os, "open", refuse)
    assert "has become read-only" in watch.trouble()


def test_any_other_error_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), FolderWatch(tmp_path).explained():
        (tmp_path / "file").read_bytes()


# --- Lines as they are written, holes in a file, records of another shape ----------------------------------------

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
