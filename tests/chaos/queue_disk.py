"""A disk with faults: a kill, an error or a power cut at any file operation of the queue."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.queue.filesystem import Files, OsFiles

OPERATIONS = [name for name in vars(Files) if not name.startswith("_") and name != "close"]
NEED_ROOM = ("create", "rename", "make_folder")

# What is left of a file that nobody synced. Names reach the disk in order, as on a journalling file system.
UNSYNCED: dict[str, Callable[[bytes], bytes]] = {
    "full": lambda data: data,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "zero end": lambda data: data[: len(data) * 3 // 4] + bytes(len(data) - len(data) * 3 // 4),
}


class Fault(NamedTuple):
    """What strikes at a file operation."""

    kind: str  # kill, power, or the name of an error
    moment: str  # before, in (the middle of a write), after
    unsynced: str = "full"  # what is left after a power cut
    newest: bool = False  # of the newest file alone


FAULTS = {
    "kill": [Fault("kill", moment) for moment in ("before", "in", "after")],
    "error": [Fault(name, moment) for name in ("ENOSPC", "EDQUOT", "EIO") for moment in ("before", "in")],
    "power": [Fault("power", "after", left, newest) for left in UNSYNCED for newest in (False, True)],
}
FAULTS["power"].remove(Fault("power", "after", "full", True))  # as with all files


class Killed(BaseException):
    """The process is gone: nothing catches it but the machine."""


class StruckError(OSError):
    """An error that a fault made; `strerror` is the operation."""


class Site(NamedTuple):
    """A place in the queue's modules that does a file operation."""

    module: str
    function: str
    operation: str


class WatchedFiles(OsFiles):
    """`Files` whose every operation passes through `around(operation, do, path, …)`."""

    def __init__(self, root: Path, around: Callable[..., Any]) -> None:
        super().__init__(root)
        for name in OPERATIONS:
            setattr(self, name, partial(around, name, getattr(self, name)))


class FaultyDisk:
    """What processes, by their numbers, do to the files in `root`. An armed fault strikes at one of the operations."""

    def __init__(self, root: Path, durable: int) -> None:
        self.root = root
        self.durable = durable  # the process that syncs its results
        self.armed: list[tuple[int, Fault]] = []  # operations until it strikes, counted from the fault before
        self.dead: set[int] = set()
        self.power_cut: Fault | None = None
        self.full = False
        self.cleaned_up = True  # none of the errors hit a process that removed what was half-written
        self.operations: list[str] = []
        self.killed: set[tuple[Site, str]] = set()  # where, and at which moment of it, a process was killed
        self.finishing = ""  # the claim of the result that is being handed over
        self._opened: list[WatchedFiles] = []
        self._unsynced: dict[str, None] = {}  # files, the newest last
        self._unsynced_names: set[str] = set()

    @property
    def is_quiet(self) -> bool:
        return not (self.full or self.armed)

    def files(self, who: int) -> WatchedFiles:
        self._opened.append(WatchedFiles(self.root, partial(self._around, who)))
        return self._opened[-1]

    def unsynced(self, *, newest: bool) -> list[Path]:
        paths = [self.root / path for path in self._unsynced if (self.root / path).is_file()]
        return paths[-1:] if newest else paths

    def close(self) -> None:
        for files in self._opened:
            files.close()

    def _around(self, who: int, operation: str, do: Callable[..., Any], path: str, *more: Any) -> Any:
        if who in self.dead:
            raise Killed
        self.operations.append(operation)
        assert operation != "sync" or who == self.durable
        if who == self.durable and operation == "unlink" and path == self.finishing:
            result = path.replace("_processing_by_", "_complete_from_")
            assert result not in {*self._unsynced, *self._unsynced_names}, "the claim goes before the result is safe"
        if self.full and operation == "create":
            (self.root / path).write_bytes(more[0][:9])
            raise StruckError(errno.ENOSPC, operation, path)
        if self.armed:
            wait, fault = self.armed.pop(0)
            if wait == 0:
                self._strike(fault, who, operation, do, path, *more)
            self.armed.insert(0, (wait - 1, fault))
        result = do(path, *more)
        self._remember(operation, path, *more)
        return result

    def _strike(self, fault: Fault, who: int, operation: str, do: Callable[..., Any], path: str, *more: Any) -> None:
        if fault.moment == "in" and operation == "create":
            (self.root / path).write_bytes(more[0][: len(more[0]) // 2])
        elif fault.moment == "after":
            with suppress(OSError, BadFileError):
                do(path, *more)
                self._remember(operation, path, *more)
        if fault.kind not in ("kill", "power"):
            self.cleaned_up &= operation != "unlink"
            raise StruckError(getattr(errno, fault.kind), operation, path)
        caller = sys._getframe(2).f_code
        self.killed.add((Site(Path(caller.co_filename).stem, caller.co_name, operation), fault.moment))
        self.dead.add(who)
        self.power_cut = fault if fault.kind == "power" else None
        raise Killed

    def _remember(self, operation: str, path: str, to: Any = "") -> None:
        if operation == "create":
            self._unsynced[path] = None
        elif operation == "rename":
            self._unsynced.pop(to, None)
            if path in self._unsynced:
                del self._unsynced[path]
                self._unsynced[to] = None
            self._unsynced_names.add(to)
        elif operation in ("unlink", "sync"):
            self._unsynced.pop(path, None)
            self._unsynced_names = {name for name in self._unsynced_names if not name.startswith(f"{path}/")}
