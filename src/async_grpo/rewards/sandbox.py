"""Run code that a model wrote, for rewards that need its output. Off by default; without isolation nothing is run.

The program is a new Python (`-I -S`, empty environment, no open files but its own three) in new namespaces: it sees
Python and the system's libraries read-only, one small writable directory in memory, no network, no device, no process
but its own, and has no right of its user. Its time, memory, files, processes and output are limited, and whatever it
started ends with it. bubblewrap makes the namespaces where it is installed, `unshare` otherwise; without either nothing
is run.

Not contained: bugs of the kernel, which is shared (there is no system call filter); what the libraries in /usr reveal
about the machine; and up to `processes` times `memory_bytes` of memory. For adversaries use a virtual machine.
"""

from __future__ import annotations

import json
import math
import os
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

SWITCH = "ASYNC_GRPO_RUN_MODEL_CODE"

EXITED, TIMED_OUT, TOO_MUCH_OUTPUT = "exited", "timed out", "too much output"

_STAGE = Path(__file__).with_name("sandbox_stage.py")
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_FIRST_UID = 1_000_000_000  # root runs the program as an unprivileged user, a different one for each process of the run
_START_S = 10.0  # for the namespaces to be there, on a busy machine
_READY = b"ready"


class SandboxError(AsyncGRPOError):
    """Model-written code was not run: it was not allowed, or there is no way to isolate it here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program."""

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
    status_end, status = os.pipe2(os.O_CLOEXEC)
    settings = _settings(limits, source_bytes=len(text), status_fd=status)
    with os.fdopen(status_end, "rb") as status_pipe, _input_file(text + stdin.encode(errors="replace")) as stdin_file:
        try:
            process = subprocess.Popen(
                _command(settings, limits),
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
            if time.monotonic() >= deadline and outcome == EXITED:
                outcome = TIMED_OUT
    ended = time.monotonic()
    code = _end(process, outcome, deadline)
    if read[status] != _READY or started is None:
        raise _unavailable((read[status] or read[err]).decode(errors="replace").strip() or "it did not start")
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


def _settings(limits: Limits, *, source_bytes: int, status_fd: int) -> dict[str, Any]:
    prefix = str(Path(sys.base_prefix).resolve())
    root = os.geteuid() == 0
    return {
        "status_fd": status_fd,
        "source_bytes": source_bytes,
        "build_root": root or _bubblewrap() is None,
        "become_uid": _FIRST_UID + os.getpid() if root else None,
        "python": _python(),
        "visible": [*_SYSTEM, prefix],
        "work_bytes": limits.file_bytes,
        "rlimits": {
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_NPROC": limits.processes + (0 if root else 2),  # the sandbox's own count for an ordinary user
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_CORE": 0,
        },
    }


def _command(settings: dict[str, Any], limits: Limits) -> list[str]:
    """The command that makes the namespaces; it ends with this process."""
    stage = [_python(), "-I", "-S", "-c", _STAGE.read_text(), json.dumps(settings)]
    bubblewrap = None if settings["build_root"] else _bubblewrap()
    if bubblewrap is not None:
        return [bubblewrap, *_bubblewrap_options(settings["visible"], limits), "--", *stage]
    for tool in ("setpriv", "unshare"):
        if shutil.which(tool) is None:
            raise _unavailable(f"there is neither bubblewrap nor {tool} (package util-linux)")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = ["--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child"]
    setpriv, unshare = (str(shutil.which(tool)) for tool in ("setpriv", "unshare"))
    return [setpriv, "--pdeathsig", "KILL", unshare, *user, *namespaces, *stage]


def _bubblewrap_options(visible: list[str], limits: Limits) -> list[str]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--clearenv", "--cap-drop", "ALL"]
    options += ["--dev", "/dev", "--size", str(limits.file_bytes + 65536), "--tmpfs", "/program"]
    for path in visible:
        if path.startswith("/dev/"):
            continue
        if Path(path).is_symlink():
            options += ["--symlink", str(Path(path).readlink()), path]
        else:
            options += ["--ro-bind-try", path, path]
    return [*options, "--remount-ro", "/", "--chdir", "/program"]


def _bubblewrap() -> str | None:
    return shutil.which("bwrap")


def _python() -> str:
    """The interpreter itself: a virtual environment's is a link to it, and may lie in a home directory."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())


def _unavailable(reason: str) -> SandboxError:
    return SandboxError(
        f"Code written by a model was not run, because it cannot be isolated here: {reason}. Isolation needs user "
        "namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, or the package bubblewrap; in "
        "containers the right to unshare). Without isolation, rewards that run code are not available."
    )
