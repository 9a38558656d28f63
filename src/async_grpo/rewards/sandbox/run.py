"""Starts a program in a sandbox, watches it until it and all that it started is gone, and says how it ended."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from typing import IO

from async_grpo.rewards.sandbox.command import sandbox_command, unavailable
from async_grpo.rewards.sandbox.records import EXITED, TIMED_OUT, TOO_MUCH_OUTPUT, Limits, SandboxError, SandboxResult

SWITCH = "ASYNC_GRPO_RUN_MODEL_CODE"

_START_S = 60.0  # for the namespaces to be there: milliseconds, but for a machine that is very busy
_READY = b"ready"


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
