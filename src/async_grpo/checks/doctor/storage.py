"""The file system of the run directory: room, locks and renames between two real processes, waking."""

from __future__ import annotations

import errno
import json
import os
import select
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.checks.doctor.lock_peer import FIRST_BYTE, LOCK, OFD, rename_all
from async_grpo.errors import RunDirError
from async_grpo.formatting import size
from async_grpo.queue.filesystem import check_place, nearest_existing
from async_grpo.queue.wakeups import IN_MOVED_TO, DirectoryWatch, JobPipe
from async_grpo.rundir.locks import KernelLock
from async_grpo_ipc.locks import LockFile

LITTLE_ROOM = 5_000_000_000
NO_ROOM = 100_000_000
FEW_FILES_LEFT = 20_000  # an archive keeps 10,000 groups
FEW_INSTANCES = 16  # a parameter server takes two
ANSWER_S = 20.0
_RACES = 20
_FIX_PLACE = "Choose a --run-dir on a local disk (ext4, xfs, tmpfs) that you can write to."


class Ask(Protocol):
    """A question to the other process; with `meanwhile`, which runs at the same time, the answers of both."""

    def __call__(self, question: str, meanwhile: Callable[[], Any] | None = None) -> Any: ...


def room(run_dir: Path) -> Iterator[Finding]:
    """Bytes and files that the disk of the run directory has left."""
    place = nearest_existing(run_dir)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    found = f"{size(free)} free where {run_dir} is"
    if free < NO_ROOM:
        yield error(
            "disk", found, "Make room, or choose another --run-dir: a full disk stops the run until there is room."
        )
    elif free < LITTLE_ROOM:
        yield warning(
            "disk", found, "Make room, or keep less: --keep-done 1GB, and save_total_limit in the GRPOConfig."
        )
    else:
        yield ok("disk", found)
    if disk.f_files > 0 and disk.f_favail < FEW_FILES_LEFT:
        yield warning(
            "files on disk",
            f"room for {disk.f_favail} more files; each used group is one",
            f"Delete files there, or --keep-done {max(1, disk.f_favail // 4)}.",
        )


def locks(run_dir: Path) -> Iterator[Finding]:
    """Whether a lock excludes another process, shows its holder, and is free when the holder is killed."""
    try:
        check_place(run_dir)
    except RunDirError as refusal:
        yield error("run directory", str(refusal).split(". ")[0], _FIX_PLACE)
        return
    try:
        with _scratch(run_dir) as scratch:
            yield from _try_locks(scratch)
    except OSError as failure:
        yield error("run directory", f"{nearest_existing(run_dir)} cannot be used: {failure.strerror}", _FIX_PLACE)


def _try_locks(scratch: Path) -> Iterator[Finding]:
    (scratch / OFD).touch(mode=0o600)
    queue_lock = KernelLock(scratch / LOCK)
    weights_lock = LockFile(str(scratch / OFD), writable=True, what="the doctor's file")
    with _other_process(scratch) as ask:
        queue_lock.try_acquire()
        weights_lock.try_exclusive(FIRST_BYTE)
        held = ask("try")
        queue_lock.release()
        weights_lock.unlock(FIRST_BYTE)
        free = ask("try")
        taken = queue_lock.try_acquire()  # it has both now
        for number in range(_RACES):
            (scratch / f"prize{number}").touch()
        renamed = ask(f"race {_RACES}", meanwhile=lambda: rename_all(scratch, "ours", _RACES))
    inherited = queue_lock.try_acquire() and weights_lock.try_exclusive(FIRST_BYTE)
    queue_lock.release()
    weights_lock.close()
    wrong = [
        text
        for text, is_wrong in (
            ("two processes had one lock", held["queue_lock"] or held["weights_lock"] or taken),
            ("the holder is not named", held["holder"] != os.getpid()),
            ("a free lock was refused", not (free["queue_lock"] and free["weights_lock"])),
            ("the lock of a killed process stays", not inherited),
        )
        if is_wrong
    ]
    if wrong:
        yield error("file locks", "; ".join(wrong), _FIX_PLACE)
    else:
        yield ok("file locks", "exclude another process, name their holder, and are free when it is killed")
    both = sum(renamed)
    if both == _RACES:
        yield ok("file renames", f"{_RACES} files that two processes took at once: each went to exactly one")
    else:
        yield error("file renames", f"{_RACES} files were taken {both} times by two processes", _FIX_PLACE)


def inotify(run_dir: Path, kernel: Path = Path("/proc/sys/fs/inotify")) -> Iterator[Finding]:
    """Whether the kernel tells at once what changes in a directory there."""
    try:
        with _scratch(run_dir) as scratch:
            told = _is_told(scratch)
    except OSError:
        return  # `locks` has said why
    limits = (
        {path.name: path.read_text().strip() for path in sorted(kernel.glob("max_user_*"))} if kernel.is_dir() else {}
    )
    allowed = ", ".join(f"{name}={value}" for name, value in limits.items()) or "limits unknown"
    if not told:
        yield warning(
            "inotify",
            f"not available ({allowed}): finished groups are noticed by looking 50 times a second, which costs some "
            "CPU time",
            "sysctl fs.inotify.max_user_instances=1024 fs.inotify.max_user_watches=65536 (as root, on the host).",
        )
    elif int(limits.get("max_user_instances", FEW_INSTANCES)) < FEW_INSTANCES:
        yield warning("inotify", f"works, but {allowed}", "sysctl fs.inotify.max_user_instances=1024 (as root).")
    else:
        yield ok("inotify", f"a finished group wakes the parameter server at once ({allowed})")


def job_pipe(run_dir: Path) -> Iterator[Finding]:
    """Whether a named pipe can be made there, which wakes a worker for a new job."""
    try:
        with _scratch(run_dir) as scratch:
            (scratch / "tmp").mkdir()
            with closing(JobPipe(scratch)) as pipe:
                pipe.announce(["job"])
                told = pipe.wait(ANSWER_S) and pipe.take(1) == ["job"]
    except OSError:
        return  # `locks` has said why
    if told:
        yield ok("named pipes", "a new job wakes one worker at once")
    else:
        found = "none can be made there: idle workers look for jobs 50 times a second, which costs some CPU time"
        yield warning("named pipes", found, "choose a --run-dir on ext4, xfs, btrfs or tmpfs.")


def _is_told(scratch: Path) -> bool:
    watch = DirectoryWatch({scratch: IN_MOVED_TO})
    try:
        if watch.blind:
            return False
        (scratch / "new").touch()
        (scratch / "new").rename(scratch / "job")
        return "job" in watch.wait(ANSWER_S).names
    finally:
        watch.close()


@contextmanager
def _scratch(run_dir: Path) -> Iterator[Path]:
    """A folder on the disk of the run directory, gone at the end; beside it if that is the same disk."""
    place = nearest_existing(run_dir)
    beside = place.parent
    if place == run_dir and place.stat().st_dev == beside.stat().st_dev and os.access(beside, os.W_OK):
        place = beside
    with tempfile.TemporaryDirectory(prefix=".async-grpo-doctor-", dir=place) as name:
        yield Path(name)


@contextmanager
def _other_process(scratch: Path) -> Iterator[Ask]:
    """A process with locks of its own; it is killed at the end, with what it holds."""
    other = probe.start("async_grpo.checks.doctor.lock_peer", cwd=scratch)

    def ask(question: str, meanwhile: Callable[[], Any] | None = None) -> Any:
        assert other.stdin is not None and other.stdout is not None
        print(question, file=other.stdin, flush=True)
        own = meanwhile() if meanwhile else None
        if not select.select([other.stdout], [], [], ANSWER_S)[0]:
            raise TimeoutError(errno.ETIMEDOUT, f"a second process did not answer in {ANSWER_S:g} s")
        answer = json.loads(other.stdout.readline() or "null")
        return (own, answer) if meanwhile else answer

    try:
        yield ask
    finally:
        other.kill()
        other.communicate()
