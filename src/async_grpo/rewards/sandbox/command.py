"""The command that makes the namespaces of one sandbox, and what it tells process 1 in them."""

from __future__ import annotations

import functools
import marshal
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.rewards.sandbox.records import Limits, SandboxError
from async_grpo.rewards.sandbox.seccomp import filter_program

FIRST_UID = 1_000_000_000  # root runs each program as a user of its own, who owns nothing
_OLDEST_KERNEL = (5, 14)  # since then the processes of a user are counted in each user namespace by itself
_STAGE_FILE = Path(__file__).with_name("stage.py")
_STAGE = marshal.dumps(compile(_STAGE_FILE.read_text(encoding="utf-8"), "stage.py", "exec"))  # once, not for each start
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_PAGES = 65536  # what the files of a full directory take besides their contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipes:
    """Open files that process 1 inherits."""

    status: int  # it writes one word here
    group: int | None  # and "0" here, to enter the control group

    @property
    def all(self) -> list[int]:
        return [self.status] if self.group is None else [self.status, self.group]


def sandbox_command(limits: Limits, *, source_bytes: int, pipes: Pipes) -> list[str]:
    """The command; it ends with this process.

    Raises:
        SandboxError: this machine lacks something that isolation needs.
    """
    root = _is_root_of_the_machine()
    if not root and _kernel() < _OLDEST_KERNEL:
        raise unavailable(f"Linux {platform.release()} counts the processes of all sandboxes together; 5.14 does not")
    bubblewrap = None if root else _bubblewrap()
    settings: dict[str, Any] = {
        "status_fd": pipes.status,
        "group_fd": pipes.group,
        "source_bytes": source_bytes,
        "build_root": bubblewrap is None,
        "first_uid": FIRST_UID if root else None,
        "python": _python(),
        "visible": _visible(),
        "work_bytes": limits.file_bytes + source_bytes + _PAGES,
        "filter": _filter(),
        # Besides the program, an ordinary user's namespace holds process 1, and `unshare` if it made the namespace.
        "rlimits": _rlimits(limits, others=0 if root else 1 if bubblewrap else 2),
    }
    stage = [_python(), "-I", "-S", "-c", f"import marshal\nexec(marshal.loads({_STAGE!r}))\nmain({settings!r})"]
    if bubblewrap is not None:
        return [bubblewrap, *_bubblewrap_options(settings["work_bytes"]), "--", *stage]
    return [*_unshare(root=root), *stage]


def unavailable(reason: str) -> SandboxError:
    return SandboxError(
        f"Code written by a model was not run, because it cannot be isolated here: {reason}. Isolation needs user "
        "namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu, or the package bubblewrap; in "
        "containers the right to unshare; SECURITY.md says where the sandbox runs). Without isolation, rewards that "
        "run code are not available."
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


def _unshare(*, root: bool) -> list[str]:
    for tool in ("setpriv", "unshare"):
        if shutil.which(tool) is None:
            raise unavailable(f"there is neither bubblewrap nor {tool} (package util-linux)")
    user = [] if root else ["--user", "--map-root-user"]
    namespaces = ["--net", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child"]
    setpriv, unshare = (str(shutil.which(tool)) for tool in ("setpriv", "unshare"))
    return [setpriv, "--pdeathsig", "KILL", unshare, *user, *namespaces]


def _bubblewrap_options(work_bytes: int) -> list[str]:
    options = ["--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1", "--clearenv", "--cap-drop", "ALL"]
    options += ["--size", str(work_bytes), "--tmpfs", "/program"]
    for path in _visible():
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


@functools.cache
def _bubblewrap() -> str | None:
    """bubblewrap, unless it is too old to limit the size of a directory in memory (before 0.7)."""
    found = shutil.which("bwrap")
    if found is None:
        return None
    known = subprocess.run([found, "--help"], capture_output=True, text=True, timeout=60).stdout
    return found if "--size" in known else None


def _is_root_of_the_machine() -> bool:
    """Whether this is root, not only of a user namespace: whether it can be any other user."""
    if os.geteuid() != 0:
        return False
    users = [[int(number) for number in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_UID and first + count >= FIRST_UID + 2**29 for first, _, count in users)


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in platform.release().split("-")[0].split(".")[:2])


def _visible() -> list[str]:
    return [*_SYSTEM, str(Path(sys.base_prefix).resolve())]


def _python() -> str:
    """The interpreter itself: a virtual environment's is a link to it, and may lie in a home directory."""
    return str(Path(getattr(sys, "_base_executable", "") or sys.executable).resolve())
