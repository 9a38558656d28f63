"""Starts a program in a sandbox by bubblewrap, watches it until all that it started is gone, and says how it ended."""

from __future__ import annotations

import functools
import marshal
import math
import os
import platform
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from async_grpo.errors import AsyncGRPOError
from async_grpo.rewards.sandbox.seccomp import filter_program

SWITCH = "ASYNC_GRPO_RUN_MODEL_CODE"
EXITED, TIMED_OUT, TOO_MUCH_OUTPUT = "exited", "timed out", "too much output"
_START_S = 60.0  # for the namespaces to be there: milliseconds, but for a machine that is very busy
_READY = b"ready"
_UIDS = range(1_000_000_000, 1_000_000_000 + 2**29)  # root runs each program as a user of its own, who owns nothing
_OLDEST_KERNEL = (5, 14)  # since then the processes of a user are counted in each user namespace by itself
_STAGE_FILE = Path(__file__).with_name("stage.py")
_STAGE = marshal.dumps(compile(_STAGE_FILE.read_text(encoding="utf-8"), "stage.py", "exec"))  # once, not for each start
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_PAGES = 65536  # what the files of a full directory take besides their contents


class SandboxError(AsyncGRPOError):
    """Model-written code was not run: it was not allowed, or there is no way to isolate it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    wall_s: float = 5.0  # from its start to its end
    cpu_s: int = 5  # of each of its processes
    memory_bytes: int = 256 << 20  # address space of each of its processes
    file_bytes: int = 8 << 20  # of one file, and of all files together
    processes: int = 8  # threads count
    open_files: int = 64
    output_bytes: int = 64 << 10  # of standard output, and as much of standard error

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, got {value}: nothing runs without limits.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """How a program ended. The program chose every value in it: do not trust them."""

    outcome: str  # exited, timed out, too much output
    exit_code: int  # its own; 128 + the signal that ended it; -1 if it was ended here
    stdout: str  # cut at `output_bytes`
    stderr: str
    wall_s: float

    @property
    def ok(self) -> bool:
        return self.outcome == EXITED and self.exit_code == 0


def run_code(source: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run a Python program and return how it ended and what it printed.

    Raises:
        SandboxError: `ASYNC_GRPO_RUN_MODEL_CODE=1` is not set, or this machine cannot isolate a program.
    """
    if os.environ.get(SWITCH) != "1":
        raise SandboxError(
            f"Code written by a model is not run by default: set {SWITCH}=1 for the workers. "
            "SECURITY.md says what the sandbox holds and what not."
        )
    limits = limits or Limits()
    text = source.encode(errors="replace")
    with _input_file(text + stdin.encode(errors="replace")) as stdin_file:
        return _run(limits, len(text), stdin_file)


def _run(limits: Limits, source_bytes: int, stdin_file: IO[bytes]) -> SandboxResult:
    status_end, status = os.pipe2(os.O_CLOEXEC)
    with os.fdopen(status_end, "rb") as status_pipe:
        try:
            process = subprocess.Popen(
                sandbox_command(limits, source_bytes=source_bytes, status=status),
                stdin=stdin_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env={},
                pass_fds=[status],
                start_new_session=True,
            )
        finally:
            os.close(status)
        try:
            return _watch(process, status_pipe, limits)
        finally:
            _kill(process)


def _watch(process: subprocess.Popen[bytes], status_pipe: IO[bytes], limits: Limits) -> SandboxResult:
    """Read until the program and everything that it started is gone, or it goes over a limit."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err, status = process.stdout.fileno(), process.stderr.fileno(), status_pipe.fileno()
    read = {out: b"", err: b"", status: b""}
    started: float | None = None
    deadline = time.monotonic() + _START_S
    outcome = EXITED
    with selectors.DefaultSelector() as selector, process.stdout, process.stderr:
        for pipe in read:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map() and outcome == EXITED:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                data = os.read(key.fd, 65536)
                read[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
                elif key.fd == status and read[status] == _READY:
                    started = time.monotonic()
                    deadline = started + limits.wall_s
                elif key.fd != status and len(read[key.fd]) > limits.output_bytes:
                    outcome = TOO_MUCH_OUTPUT
            if time.monotonic() >= deadline and outcome == EXITED and process.poll() is None:
                outcome = TIMED_OUT  # one that has ended was only seen late: this process was stopped meanwhile
    ended = time.monotonic()
    code = _end(process, outcome, deadline)
    if started is None and outcome == TIMED_OUT:
        raise SandboxError(
            f"A program was not run: its sandbox was not ready after {_START_S:g} s. The machine is too busy: "
            "start fewer workers on it, or give it less to do beside them."
        )
    if read[status] != _READY or started is None:
        raise unavailable((read[status] or read[err]).decode(errors="replace").strip() or "it did not start")
    stdout, stderr = (read[pipe][: limits.output_bytes].decode(errors="replace") for pipe in (out, err))
    if code is None:
        outcome, code = (TIMED_OUT if outcome == EXITED else outcome), -1
    return SandboxResult(outcome=outcome, exit_code=code, stdout=stdout, stderr=stderr, wall_s=ended - started)


def _end(process: subprocess.Popen[bytes], outcome: str, deadline: float) -> int | None:
    """The exit code of a program that closed its output in time; None for one that was ended here."""
    if outcome == EXITED:
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        else:
            return code if code >= 0 else 128 - code
    _kill(process)
    return None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End process 1 of the sandbox, with which the kernel ends everything in it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _input_file(data: bytes) -> IO[bytes]:
    """Source and standard input in a file in memory: a pipe would have to be fed while the program runs."""
    file = os.fdopen(os.memfd_create("sandbox-input", os.MFD_CLOEXEC), "w+b")
    file.write(data)
    file.seek(0)
    return file


def sandbox_command(limits: Limits, *, source_bytes: int, status: int) -> list[str]:
    """The command; it ends with this process. `status` is an open file that process 1 inherits and writes a word to.

    Raises:
        SandboxError: this machine lacks something that isolation needs.
    """
    bubblewrap, root = _bubblewrap(), _is_root_of_the_machine()
    if not root and _kernel() < _OLDEST_KERNEL:
        raise unavailable(f"Linux {platform.release()} counts the processes of all sandboxes together; 5.14 does not")
    settings: dict[str, Any] = {
        "status_fd": status,
        "source_bytes": source_bytes,
        "uid": secrets.choice(_UIDS) if root else None,
        "python": _python(),
        "filter": _filter(),
        "rlimits": _rlimits(limits, others=0 if root else 1),  # an ordinary user's namespace holds process 1, too
    }
    stage = [_python(), "-I", "-S", "-c", f"import marshal\nexec(marshal.loads({_STAGE!r}))\nmain({settings!r})"]
    return [bubblewrap, *_namespaces(root=root), *_files(limits.file_bytes + source_bytes + _PAGES), "--", *stage]


def unavailable(reason: str) -> SandboxError:
    return SandboxError(
        f"Code written by a model was not run, because it cannot be isolated here: {reason}. Isolation needs "
        "bubblewrap 0.7 or newer (apt-get install bubblewrap; conda-forge has it, too) and the right to make "
        "namespaces, which most containers do not give, nor does Ubuntu without sysctl "
        "kernel.apparmor_restrict_unprivileged_userns=0 (SECURITY.md says where the sandbox runs). Without isolation, "
        "rewards that run code are not available."
    )


def _rlimits(limits: Limits, *, others: int) -> dict[str, int]:
    return {
        "RLIMIT_CPU": limits.cpu_s,
        "RLIMIT_AS": limits.memory_bytes,
        "RLIMIT_FSIZE": limits.file_bytes,
        "RLIMIT_NPROC": limits.processes + others,
        "RLIMIT_NOFILE": limits.open_files,
        "RLIMIT_CORE": 0,
    }


def _namespaces(*, root: bool) -> list[str]:
    """No user namespace for root: it can show an interpreter that lies in a home directory, and needs no right to it.

    What root keeps is for process 1, to become the program's user.
    """
    options = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    options += ["--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    if not root:
        return [*options, "--unshare-user"]
    for right in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
        options += ["--cap-add", right]
    return options


def _files(work_bytes: int) -> list[str]:
    """Python and the system's libraries, read-only, and one small writable directory. No home, no data."""
    options = ["--perms", "1777", "--size", str(work_bytes), "--tmpfs", "/program"]
    for path in (*_SYSTEM, str(Path(sys.base_prefix).resolve())):
        for folder in list(Path(path).parents)[-2::-1]:
            options += ["--dir", str(folder)]  # for every user: those that bubblewrap makes by itself are root's alone
        if path.startswith("/dev/"):
            options += ["--dev-bind-try", path, path]  # not --dev: its /dev could be written to without limit
        elif Path(path).is_symlink():
            options += ["--symlink", str(Path(path).readlink()), path]
        else:
            options += ["--ro-bind-try", path, path]
    return [*options, "--remount-ro", "/", "--chdir", "/program"]


@functools.cache
def _filter() -> bytes:
    try:
        return filter_program(platform.machine())
    except ValueError as error:
        raise unavailable(str(error)) from error


def _bubblewrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise unavailable("bubblewrap is not installed")
    if not _limits_sizes(found):
        raise unavailable(f"{found} is too old")
    return found


@functools.cache
def _limits_sizes(bubblewrap: str) -> bool:
    """Whether it can limit the size of a directory in memory: since 0.7."""
    return "--size" in subprocess.run([bubblewrap, "--help"], capture_output=True, text=True, timeout=60).stdout


def _is_root_of_the_machine() -> bool:
    """Whether this is root, not only of a user namespace: whether it can be any other user."""
    if os.geteuid() != 0:
        return False
    users = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= _UIDS.start and first + count >= _UIDS.stop for first, _, count in users)


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def _python() -> str:
    """The interpreter itself: a virtual environment's is a link to it, and may lie in a home directory."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())
