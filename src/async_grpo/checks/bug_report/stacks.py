"""The processes of a run as its locks tell, and the stacks of each: what a hung run is doing.

Only a live holder of one of the run's locks is signalled, or, of a trainer in several processes, one that has its file
of stacks in this run open: the kernel names both. It is held by a pidfd from before it is named the second time, so
that a pid that another process has by now is never signalled.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from async_grpo.errors import BadFileError
from async_grpo.formatting import size
from async_grpo.queue.liveness import live_workers, worker_lock
from async_grpo.rundir.locks import KernelLock, server_lock
from async_grpo.rundir.paths import SERVER, RunDir
from async_grpo.rundir.reading import open_plain
from async_grpo.setup.process import STACKS_SIGNAL, STACKS_THREAD

ANSWER_S = 10.0  # a process answers in milliseconds, on a busy machine in seconds, or is stopped or in the kernel
_POLL_S = 0.02
_QUIET_S = 0.5  # without another line for this long, the writer has ended
_TGKILL = {"x86_64": 234, "aarch64": 131}  # the system call that signals a thread; older C libraries have no function


@dataclass(frozen=True, slots=True)
class RunProcess:
    name: str  # "server", "dev1", "rank1"
    pid: int
    belongs: Callable[[], bool]  # whether this pid is still that process
    stacks: Path


def run_processes(run: RunDir) -> Iterator[RunProcess]:
    """The parameter server, its other ranks, and each worker."""
    server = server_lock(run.root)
    if (holder := server.holder()) is not None:
        yield _holder(SERVER, int(holder["pid"]), server, run.stacks(SERVER))
    for path in sorted((run.root / "alive").glob("rank*.stacks")):
        for pid in psutil.pids():  # sorted: the oldest first, as far as numbers tell
            if _has_open(pid, path):
                yield RunProcess(path.stem, pid, partial(_has_open, pid, path), path)
                break  # its forked children have the file open as well
    for worker in live_workers(run.root):
        yield _holder(worker.name, worker.pid, worker_lock(run.root, worker.id), run.stacks(worker.name))


def _holder(name: str, pid: int, lock: KernelLock, stacks: Path) -> RunProcess:
    return RunProcess(name, pid, lambda: (lock.holder() or {}).get("pid") == pid, stacks)


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has this very file open. False for processes of others."""
    try:
        wanted = path.stat(follow_symlinks=False)
        return any(os.path.samestat(wanted, entry.stat()) for entry in os.scandir(f"/proc/{pid}/fd"))
    except OSError:
        return False


def stacks_of(process: RunProcess, timeout_s: float = ANSWER_S) -> str:
    """Ask for the stacks of all threads; without an answer, a sentence that says why.

    The process is signalled, and once, only where its thread for stacks does not answer: a call of C keeps the
    interpreter's lock then, so no other thread runs whose stack could be torn (`process.write_stacks_on_signal`).
    """
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError as error:
        return f"{process.name} (pid {process.pid}) cannot be reached: {error.strerror}; is it in another container?\n"
    try:
        if not process.belongs():
            return f"{process.name} (pid {process.pid}) ended just now.\n"
        if not listens(process.pid):
            return (
                f"{process.name} (pid {process.pid}) has not begun to listen for {STACKS_SIGNAL.name}: it is just "
                "starting. It was not signalled.\n"
            )
        if (thread := _thread_for_stacks(process)) is not None:
            signal.pidfd_send_signal(pidfd, 0)  # as long as the process is there, no other one can have its pid
            before = _length(process.stacks)
            ctypes.CDLL(None).syscall(_TGKILL[platform.machine()], process.pid, thread, STACKS_SIGNAL)
            text = _new_text(process.stacks, before, timeout_s / 2)
            if text or _state(process.pid) == psutil.STATUS_STOPPED:  # it answers when it continues
                return text or _silence(process, timeout_s)
        before = _length(process.stacks)
        signal.pidfd_send_signal(pidfd, STACKS_SIGNAL)
        text = _new_text(process.stacks, before, timeout_s)
    except ProcessLookupError:
        return f"{process.name} (pid {process.pid}) ended just now.\n"
    finally:
        os.close(pidfd)
    return text or _silence(process, timeout_s)


def _thread_for_stacks(process: RunProcess) -> int | None:
    """The thread that writes the stacks, as it says in their file. None where there is none (yet)."""
    with suppress(OSError, BadFileError), os.fdopen(open_plain(process.stacks), "rb") as file:
        named, _, thread = file.readline(100).decode(errors="replace").strip().rpartition(" ")
        if f"{named} " == STACKS_THREAD and Path(f"/proc/{process.pid}/task/{thread}").exists():
            return int(thread)
    return None


def listens(pid: int) -> bool:
    """Whether the process has a handler for the signal, which would otherwise end it."""
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (STACKS_SIGNAL - 1) & 1)


def kernel_view(pid: int) -> str:
    """The kernel's view: state, threads, memory, and where in the kernel each thread waits."""
    lines = [f"pid {pid}"]
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        lines[0] += f" {process.name()}: {process.status()}, {size(process.memory_info().rss)} resident"
        for thread in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            name, waits = _read(thread / "comm"), _read(thread / "wchan")
            state = _read(thread / "stat").rpartition(")")[2].split()[:1]
            lines.append(f"  thread {thread.name} {name}: {''.join(state)}, in {waits.strip('0') or '?'}")
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _state(pid: int) -> str:
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "unknown"


def _silence(process: RunProcess, timeout_s: float) -> str:
    state = _state(process.pid)
    why = {
        psutil.STATUS_STOPPED: "It is stopped (Ctrl-Z, SIGSTOP): kill -CONT continues it, and it writes its stacks",
        psutil.STATUS_DISK_SLEEP: "It waits in the kernel, for a disk, a network file system or a driver",
        psutil.STATUS_ZOMBIE: "It has ended, and its parent has not noticed",
    }.get(state, "It may be in a call that no signal interrupts")
    return f"{process.name} (pid {process.pid}) did not answer in {timeout_s:g} s. Its state is {state}. {why}.\n"


def _new_text(path: Path, before: int, timeout_s: float) -> str:
    """The text that was appended since, once nothing more comes."""
    deadline = time.monotonic() + timeout_s
    length, changed = before, time.monotonic()
    while time.monotonic() < deadline:
        now = _length(path)
        if now != length:
            length, changed = now, time.monotonic()
        elif now > before and time.monotonic() - changed > _QUIET_S:
            break
        time.sleep(_POLL_S)
    with suppress(OSError, BadFileError), os.fdopen(open_plain(path), "rb") as file:
        file.seek(before)
        return file.read(1 << 20).decode(errors="replace")
    return ""


def _length(path: Path) -> int:
    try:
        return path.stat(follow_symlinks=False).st_size
    except OSError:
        return 0
