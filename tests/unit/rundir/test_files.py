"""Files of whole lines, on a full disk and after a cut; JSON files that appear whole; folders that are empty."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import BadFileError, DiskFullError
from async_grpo.records import WorkerId
from async_grpo.rundir.files import LineFile, fresh_folder, write_json
from async_grpo.rundir.paths import RunDir
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
