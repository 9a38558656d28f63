"""What the slots of a live exporter hold and who reads them, without torch and without becoming a reader."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_grpo_ipc import memfd
from async_grpo_ipc.errors import HandleFileError
from async_grpo_ipc.handle_body import REMEDY, read_body
from async_grpo_ipc.header import HEADER_BYTES, Header
from async_grpo_ipc.leases import FIRST_SLOT_BYTE, LockFile


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot at the moment of the look."""

    number: int
    state: str  # EMPTY, WRITING, READY, CORRUPT
    version: int  # -1 before the first
    newest: bool
    holders: tuple[int, ...]  # pids that read or write it


def look_at_slots(path: Path, pids: Sequence[int]) -> list[Slot]:
    """The slots that the handle file at `path` names; of the holders, those that are among `pids`.

    Raises:
        IPCError: there is nothing to look at; the message says why.
    """
    body = read_body(path)
    try:
        pid, slots, generation = int(body["pid"]), int(body["slots"]), str(body["generation"])
        fd, inode = int(body["control"]["fd"]), int(body["control"]["inode"])
    except (KeyError, TypeError, ValueError) as error:
        raise HandleFileError(f"{path} has a field that makes no sense: {error!r}. {REMEDY}") from error
    header = Header(memfd.attach(pid, fd, inode, HEADER_BYTES), generation, slots)
    header.check(str(path))
    try:
        locks = LockFile(memfd.proc_path(pid, fd), writable=False, what=f"a look at {path}")
    except (FileNotFoundError, ProcessLookupError) as error:
        raise memfd.exporter_gone(pid) from error
    try:
        return _slots(header, locks, pids)
    finally:
        locks.close()


def _slots(header: Header, locks: LockFile, pids: Sequence[int]) -> list[Slot]:
    newest = header.newest()
    return [
        Slot(
            number=record.slot,
            state=record.state.name,
            version=record.version,
            newest=newest is not None and record.slot == newest.slot,
            holders=tuple(locks.holders(FIRST_SLOT_BYTE + record.slot, pids)),
        )
        for record in header.records()
    ]
