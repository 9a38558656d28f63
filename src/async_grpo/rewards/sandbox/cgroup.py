"""A control group for one sandbox: a limit on all of its memory, and on its processes, where one can be made.

The limits of a process do not count page tables and buffers of the kernel; a control group does. Making one needs root
and a writable /sys/fs/cgroup, or a part of the tree that was delegated to this user, as systemd does for its user
services; in most containers it cannot be done, and the other limits have to be enough.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_TREE = Path("/sys/fs/cgroup")
_PREFIX = "async-grpo-sandbox-"
_STALE_S = 60.0  # an empty group of this age was left by a worker that was killed
_GONE_S = 2.0  # for processes that were killed to leave the group


@contextmanager
def control_group(*, memory_bytes: int, processes: int) -> Iterator[list[int]]:
    """Open files to which a process writes "0" to enter the new group. No files where no group can be made."""
    with ExitStack() as stack:
        try:
            doors = [
                stack.enter_context(_group(parent, _limits(kind, memory_bytes=memory_bytes, processes=processes)))
                for kind, parent in _parents()
            ]
        except OSError:
            doors = []  # the tree has changed, or is full
        yield doors


def _limits(kind: str, *, memory_bytes: int, processes: int) -> dict[str, int]:
    """Files of a group and what to write to them; swap is not counted everywhere, so its file may be missing."""
    memory_v1 = {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes}
    memory_v2 = {"memory.max": memory_bytes, "memory.swap.max": 0, "memory.oom.group": 1}
    pids = {"pids.max": processes}
    return {"unified": memory_v2 | pids, "memory": memory_v1, "pids": pids}[kind]


@contextmanager
def _group(parent: Path, limits: dict[str, int]) -> Iterator[int]:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        for name, value in limits.items():
            if "swap" in name or "memsw" in name:
                with suppress(OSError):
                    (folder / name).write_text(str(value))
            else:
                (folder / name).write_text(str(value))
        door = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield door
        finally:
            os.close(door)
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """A group can be removed when the last process in it is gone."""
    deadline = time.monotonic() + _GONE_S
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                return  # a later worker removes it
            time.sleep(0.005)
        else:
            return


@functools.cache
def _parents() -> list[tuple[str, Path]]:
    """Where this process can make groups: one place in the unified tree, or one in each of two older ones."""
    own = _own_groups()
    unified = [group for base in (_TREE, _TREE / "unified") for group in _and_above(base, own.get("", ""))]
    found = [("unified", group) for group in unified if _controls_children(group)][:1]
    if not found:
        found = [(kind, _TREE / kind / own.get(kind, "").lstrip("/")) for kind in ("memory", "pids")]
    if not all(os.access(parent / "cgroup.procs", os.W_OK) and os.access(parent, os.W_OK) for _, parent in found):
        return []
    for _, parent in found:
        _sweep(parent)
    return found


def _own_groups() -> dict[str, str]:
    """The group of this process in each tree, by controller; "" is the unified tree."""
    with suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        return {controller: path for _, controllers, path in lines for controller in controllers.split(",")}
    return {}


def _and_above(base: Path, path: str) -> list[Path]:
    """The group and its parent: a group with processes in it has no children with limits, except the root."""
    own = base / path.lstrip("/")
    return [own] if own == base else [own, own.parent]


def _controls_children(group: Path) -> bool:
    try:
        return {"memory", "pids"} <= set((group / "cgroup.subtree_control").read_text().split())
    except OSError:
        return False


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                folder.rmdir()  # fails if a process is in it
