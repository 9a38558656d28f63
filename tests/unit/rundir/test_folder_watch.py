"""A run directory that is renamed, deleted, replaced or read-only while the run goes on: the cause is said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.errors import RunDirError
from async_grpo.rundir import folder_watch
from async_grpo.rundir.folder_watch import FolderWatch


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
        (shutil.rmtree, "was renamed or deleted while the run was going on"),
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
