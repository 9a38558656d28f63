"""One archive for a bug report: what the run's processes do, their logs, and the machine. No secrets."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import psutil

from async_grpo.checks.bug_report.stacks import RunProcess, kernel_view, run_processes, stacks_of
from async_grpo.checks.doctor import checkup
from async_grpo.checks.doctor.finding import Asked, line, verdict
from async_grpo.errors import AsyncGRPOError, BadFileError, UsageError
from async_grpo.queue.filesystem import FOLDERS
from async_grpo.redaction import Redactor, is_secret
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import read_end
from async_grpo.status.snapshot import look

LOG_BYTES = 200_000  # of the end of each file
NAMES_AT_MOST = 2000  # of each folder; done/ may have many thousands

ABOUT = """\
A report of `async-grpo doctor --dump` about {root}, {when}.

stacks/        what each live process of the run was doing, thread by thread (names of functions, no values)
processes.txt  what the kernel says of them
status.json    what `async-grpo status --json` says, without the reasons of groups that were given up
logs/          the end of each log
run.json, summary.json, metrics.jsonl    as they lie in the run directory (of the metrics, the end)
queue.txt      the names of the queue's files; not their contents: prompts and completions may be private
doctor.txt     the checks of this machine
versions.txt   Python, the system, every installed package
environment.txt    some environment variables, from a fixed list

Passwords, tokens and keys that could be recognised were replaced by [removed], everywhere. LOGS MAY HOLD WHAT YOUR CODE
PRINTED, prompts too: look through them before you share this file.
"""


def write_dump(root: Path, folder: Path) -> tuple[Path, list[str]]:
    """Write `async-grpo-dump-….tar.gz` into `folder`; returns it and the names in it.

    Works on a live, a hung, a dead and a finished run, and changes nothing of it.

    Raises:
        UsageError: `root` is not a run directory, or `folder` cannot be written to.
    """
    run = RunDir(root)
    if not run.root.is_dir():
        raise UsageError(f"{root} is not a directory. Give the run's, such as worker/.")
    if not run.state_file.exists() and not (run.root / "queue").is_dir():
        raise UsageError(f"{root} is not a run directory: it has no run.json and no queue. Give one, such as worker/.")
    processes = list(run_processes(run))
    redact = Redactor(secrets_of(os.environ).union(*(secrets_of(environment_of(p.pid)) for p in processes)))
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    target = folder / f"async-grpo-dump-{run.root.name}-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.tar.gz"
    names: list[str] = []
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}. Go to a folder that can.") from error
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in _contents(run, processes, when):
                data = redact(content).encode(errors="replace")
                entry = tarfile.TarInfo(f"{target.name.removesuffix('.tar.gz')}/{name}")
                entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
                archive.addfile(entry, io.BytesIO(data))
                names.append(name)
    except BaseException:  # also Ctrl-C: half an archive looks like a whole one
        target.unlink(missing_ok=True)
        raise
    return target, names


def _contents(run: RunDir, processes: list[RunProcess], when: str) -> Iterator[tuple[str, str]]:
    yield "README.txt", ABOUT.format(root=run.root, when=when)
    yield "status.json", _status(run)  # first: a live run changes meanwhile
    for process in processes:
        yield f"stacks/{process.name}.txt", stacks_of(process)
    views = [f"== {process.name}\n{kernel_view(process.pid)}" for process in processes]
    yield "processes.txt", "\n".join(views) or "No process holds a lock of this run: it has ended, or was killed.\n"
    yield from _files(run)
    yield "queue.txt", "\n".join(_queue_names(run.root)) + "\n"
    yield "versions.txt", "\n".join(_versions()) + "\n"
    yield "environment.txt", "\n".join(_environments(processes)) + "\n"
    yield "doctor.txt", _own_findings(run.root)


def _status(run: RunDir) -> str:
    """The reasons of groups that were given up are left out: a traceback may quote a prompt."""
    try:
        view = look(run.root).to_json()
    except (AsyncGRPOError, OSError, ValueError) as error:
        return json.dumps({"error": str(error)})
    view["quarantined"] = [{**entry, "reason": "(left out)"} for entry in view["quarantined"]]
    return json.dumps(view, indent=2)


def _files(run: RunDir) -> Iterator[tuple[str, str]]:
    for path in sorted(run.root.glob("log_*.txt")):
        yield f"logs/{path.name}", tail(path, LOG_BYTES)
    for path in (run.state_file, run.summary, run.metrics):
        if path.exists():
            yield path.name, tail(path, LOG_BYTES)


def tail(path: Path, most: int) -> str:
    """The end of a file, whole lines; a sentence where it is not a plain file. Follows no link, waits for no pipe."""
    try:
        data, start = read_end(path, most)
    except (OSError, BadFileError) as error:
        return f"({error})\n"
    if start:
        data = f"({start:,} bytes before this were left out)\n".encode() + data.partition(b"\n")[2]
    return data.decode(errors="replace")


def _queue_names(root: Path) -> Iterator[str]:
    now = time.time()
    for folder in FOLDERS:
        paths = sorted(path for path in (root / folder).rglob("*") if not path.is_dir())
        yield f"{folder}/: {len(paths)} files"
        if len(paths) > NAMES_AT_MOST:
            yield f"    (the last {NAMES_AT_MOST})"
        for path in paths[-NAMES_AT_MOST:]:
            with suppress(OSError):
                status = path.stat(follow_symlinks=False)
                age = now - status.st_ctime
                yield f"    {path.relative_to(root)}  {status.st_size:,} bytes  changed {age:.1f} s ago"


def _versions() -> Iterator[str]:
    yield f"Python {sys.version}"
    yield f"{platform.platform()}, {os.cpu_count()} cores"
    found = {(entry.metadata["Name"] or "?", entry.version) for entry in metadata.distributions()}
    yield from (f"{name}=={version}" for name, version in sorted(found, key=lambda pair: pair[0].lower()))


def _environments(processes: Iterable[RunProcess]) -> Iterator[str]:
    every = {"doctor": dict(os.environ), **{process.name: environment_of(process.pid) for process in processes}}
    for name, environment in every.items():
        yield f"== {name}"
        yield from (f"{key}={environment[key]}" for key in SHOWN if key in environment)


def _own_findings(root: Path) -> str:
    found = [*checkup.findings(Asked(run_dir=root))]
    lines = [line(finding, width=120) for finding in found]
    return "\n".join([*lines, "", verdict(found), "", json.dumps([asdict(finding) for finding in found])]) + "\n"


SHORTEST = 6  # characters of a secret; shorter values would be found everywhere

# The only environment variables whose values are written.
SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("WORKER_DEVICE", "LOG_LEVEL", "FAST_INFERENCE", "CUDA_IPC_HANDLE_PATH", "UNSLOTH_COMPILE_LOCATION"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "HF_HUB_OFFLINE", "VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "LANG", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
)


def environment_of(pid: int) -> dict[str, str]:
    """The environment of a process of this user; empty where the kernel does not tell."""
    try:
        return dict(psutil.Process(pid).environ())
    except (psutil.Error, OSError):
        return {}


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Values of variables whose names say that they are secret."""
    return {
        value
        for name, value in environment.items()
        if is_secret(name, value) and len(value) >= SHORTEST and name not in SHOWN
    }
