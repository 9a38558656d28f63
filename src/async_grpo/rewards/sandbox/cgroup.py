"""A control group for one sandbox: a limit on all of its memory, where one can be made.

The limits of a process do not count page tables and buffers of the kernel; a control group does. Making one needs root
and a writable /sys/fs/cgroup, or a part of the tree that was delegated to this user, as systemd does for its user
services; in most containers it cannot be done, and the other limits have to be enough. Processes are counted without
one: a group for them would make each start 10 ms longer, which is what the kernel waits when a process changes groups.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_TREE = Path("/sys/fs/cgroup")
_PREFIX = "async-grpo-sandbox-"
_STALE_S = 60.0  # an empty group of this age was left by a worker that was killed
_GONE_S = 2.0  # for processes that were killed to leave the group


@contextmanager
def control_group(memory_bytes: int) -> Iterator[int | None]:
    """An open file to which a process writes "0" to enter the new group; None where no group can be made."""
    made = None
    if (parent := _parent()) is not None:
        with suppress(OSError):  # the tree has changed, or is full
            made = _make(parent, memory_bytes)
    if made is None:
        yield None
        return
    folder, door = made
    try:
        yield door
    finally:
        os.close(door)
        _remove(folder)


def _make(parent: Path, memory_bytes: int) -> tuple[Path, int]:
    """A group with a limit, and its door. Swap is not counted everywhere, so the files for it may be missing."""
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    unified = (folder / "memory.max").exists()
    (folder / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(memory_bytes))
    with suppress(OSError):
        swap, most = ("memory.swap.max", 0) if unified else ("memory.memsw.limit_in_bytes", memory_bytes)
        (folder / swap).write_text(str(most))
    return folder, os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)


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
def _parent() -> Path | None:
    """Where this process can make groups: in the unified tree, or in the older one for memory."""
    own = _own_groups()
    unified = [group for base in (_TREE, _TREE / "unified") for group in _and_above(base, own.get("", ""))]
    older = [_TREE / "memory" / own["memory"].lstrip("/")] if "memory" in own else []
    for group in [*(group for group in unified if _limits_memory_of_children(group)), *older]:
        if os.access(group, os.W_OK) and os.access(group / "cgroup.procs", os.W_OK):
            _sweep(group)
            return group
    return None


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


def _limits_memory_of_children(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime > _STALE_S:
                folder.rmdir()  # fails if a process is in it
