"""A run directory is checked before anything in it is changed, and nothing is reached by a link in it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import AsyncGRPOError, BadFileError, RunDirError
from async_grpo.launch.supervisor import Child, Supervisor
from async_grpo.queue.filesystem import prepare_root
from async_grpo.reports.board import Board
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.lifecycle import prepare, preview
from async_grpo.rundir.paths import FINISHED, RunDir
from async_grpo.setup.process import log_to, write_stacks_on_signal
from async_grpo.telemetry.activity import Activity
from kit.plans import planned

CONFIG = Path("my_trainer.py")
Start = Callable[[Path], object]
STARTS: list[Start] = [lambda root: prepare(root, planned(CONFIG)), preview, prepare_root]


def state_of(root: Path) -> list[tuple[str, int, int]]:
    return [(str(path), path.lstat().st_mode, path.lstat().st_ino) for path in [root, *sorted(root.rglob("*"))]]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused_unchanged(tmp_path: Path, start: Start, mode: int) -> None:
    root = tmp_path / "worker"
    root.mkdir()
    root.chmod(mode)
    before = state_of(root)
    with pytest.raises(RunDirError, match=f"can be written by others .mode {mode:o}.*chmod go-w {root}"):
        start(root)
    assert state_of(root) == before


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, start: Start, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`preview` too: it is what a dry run approves."""
    opened = os.open

    def refuse(path: object, flags: int, *rest: int, **more: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunDirError, match=rf"{tmp_path}: .* Choose another place"):
        start(tmp_path / "new" / "worker")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", [os.fsdecode(b"w\xff"), "\ud800", "a\0b"])
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, start: Start, name: str) -> None:
    with pytest.raises(RunDirError, match=r"cannot be a run directory: it (is not UTF-8|has a null character in it)"):
        start(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("start", STARTS)
def test_a_folder_below_a_file_is_refused(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="a part of this path is a file"):
        start(tmp_path / "file" / "worker")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("start", STARTS)
def test_a_directory_of_another_user_is_refused_unchanged(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "worker"
    root.mkdir(mode=0o755)
    os.chown(root, 65534, 65534)
    before = state_of(root)
    with pytest.raises(RunDirError, match="belongs to user 65534"):
        start(root)
    assert state_of(root) == before


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_a_link_in_its_place_is_refused(tmp_path: Path, start: Start, target: str) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "worker").symlink_to(tmp_path / target)
    with pytest.raises(RunDirError, match="links are not followed"):
        start(tmp_path / "worker")
    assert list((tmp_path / "there").iterdir()) == [] and not (tmp_path / "nowhere").exists()


def test_a_link_above_it_is_followed_as_everywhere(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "home").symlink_to(tmp_path / "disk")
    prepare(tmp_path / "home" / "worker", planned(CONFIG))
    assert (tmp_path / "disk" / "worker" / "run.json").exists()


def test_a_directory_that_only_others_can_read_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir(mode=0o755)
    prepare(tmp_path / "worker", planned(CONFIG))
    assert (tmp_path / "worker").stat().st_mode & 0o777 == 0o700


def test_the_curves_of_an_earlier_version_get_a_folder_that_is_private(tmp_path: Path) -> None:
    """TensorBoard had made it, with umask 002."""
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard").chmod(0o775)
    with pytest.raises(RunDirError, match="can be written by others"):
        make_folder(tmp_path / "tensorboard")
    make_folder(tmp_path / "tensorboard", in_private=True)
    assert (tmp_path / "tensorboard").stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "tensorboard")
    with pytest.raises(RunDirError):
        make_folder(tmp_path / "link", in_private=True)


def _start_child(log: Path) -> None:
    child = Child(name="server", command=[sys.executable, "-c", "print('appended')"], env={}, log=log, grace_s=1)
    with Supervisor([child], say=print) as supervisor:
        supervisor.run_until(lambda exits: "server" in exits)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("log_parameter_server.txt", _start_child),
        ("log_parameter_server.txt", lambda path: log_to(path, "INFO")),
        ("metrics.jsonl", lambda path: LineFile(path).append("appended")),
        ("alive/server.stacks", write_stacks_on_signal),
        ("alive/server.status", lambda path: Activity().publish(path.parents[1], "server", **WHO)),
    ],
)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link_or_into_a_pipe(tmp_path: Path, name: str, write: Start, kind: str) -> None:
    (tmp_path / "alive").mkdir(mode=0o700)
    victim, path = tmp_path / "victim", tmp_path / name
    victim.write_text("mine\n")
    if kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    with pytest.raises(BadFileError, match=f"{path} cannot be used: it (is a link|is a named pipe|cannot be opened)"):
        write(path)
    assert victim.read_text() == "mine\n"


WHO = {"device": "cpu", "run_id": "run", "state": "loading", "stall_after_s": 60.0}


@pytest.mark.parametrize("folder", ["board", "board/run", "alive"])
def test_nothing_is_made_or_emptied_in_a_folder_that_is_a_link(tmp_path: Path, folder: str) -> None:
    root, victim = tmp_path / "worker", tmp_path / "victim"
    prepare(root, planned(CONFIG))
    RunDir(root).update_state(state=FINISHED)
    events = victim / ("run" if folder == "board" else "") / "events.out.tfevents.1.async-grpo"
    events.parent.mkdir(parents=True)
    events.write_text("mine")
    (root / folder).parent.mkdir(mode=0o700, exist_ok=True)
    (root / folder).symlink_to(victim)
    (root / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    with pytest.raises(AsyncGRPOError, match="links are not followed"):
        if folder == "alive":
            Activity().publish(root, "server", **WHO)
        with Board(root) as board:
            board.update()
    assert [path.name for path in victim.rglob("*") if path.is_file()] == [events.name]
    assert events.read_text() == "mine"


@pytest.mark.parametrize("name", ["server.lock", "run.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_lies_in_the_place_of_the_lock_or_of_the_state_is_named(tmp_path: Path, name: str, kind: str) -> None:
    root, victim = tmp_path / "worker", tmp_path / "victim"
    prepare(root, planned(CONFIG))
    victim.write_text("mine")
    (root / name).unlink(missing_ok=True)
    {"link": lambda path: path.symlink_to(victim), "pipe": os.mkfifo, "folder": Path.mkdir}[kind](root / name)
    for start in STARTS[:2]:
        with pytest.raises(AsyncGRPOError, match=f"{root / name} cannot be used: it "):
            start(root)
    assert victim.read_text() == "mine"
