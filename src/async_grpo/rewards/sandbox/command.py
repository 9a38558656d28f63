"""The command of bubblewrap that makes one sandbox, and what it tells process 1 in it."""

from __future__ import annotations

import functools
import marshal
import os
import platform
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from async_grpo.rewards.sandbox.records import Limits, SandboxError
from async_grpo.rewards.sandbox.seccomp import filter_program

_UIDS = range(1_000_000_000, 1_000_000_000 + 2**29)  # root runs each program as a user of its own, who owns nothing
_OLDEST_KERNEL = (5, 14)  # since then the processes of a user are counted in each user namespace by itself
_STAGE_FILE = Path(__file__).with_name("stage.py")
_STAGE = marshal.dumps(compile(_STAGE_FILE.read_text(encoding="utf-8"), "stage.py", "exec"))  # once, not for each start
_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/zero", "/dev/urandom")
_PAGES = 65536  # what the files of a full directory take besides their contents


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
