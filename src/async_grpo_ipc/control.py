"""The control file: the shared header and the byte locks, one small memfd for each generation."""

import uuid
from typing import Self

from async_grpo_ipc import memfd
from async_grpo_ipc.descriptors import OwnedFd
from async_grpo_ipc.header import HEADER_BYTES, Header
from async_grpo_ipc.leases import ATTACHED_BYTE, FIRST_SLOT_BYTE, OWNER_BYTE, LockFile, SlotLeases


def new_generation() -> str:
    return uuid.uuid4().hex


class Control:
    """One process's view of a generation's control file.

    The locks are taken through a second opening of the file: a mapping keeps the description alive that it
    was made from, in forked children too, and a lock taken through that one would outlive its holder.
    """

    def __init__(self, header: Header, locks: LockFile, fd: OwnedFd | None = None) -> None:
        self.header = header
        self.locks = locks
        self.leases = SlotLeases(locks)
        self._fd = fd

    @classmethod
    def create(cls, generation: str, slots: int) -> Self:
        """The exporter's side: an initialised header, and the owner lock held."""
        fd, mapping = memfd.create(f"control-{generation}", HEADER_BYTES)
        header = Header(mapping, generation, slots)
        header.initialise()
        locks = LockFile(f"/proc/self/fd/{fd.fileno()}", writable=True, what=f"weight exporter {generation}")
        locks.try_exclusive(OWNER_BYTE)
        return cls(header, locks, fd)

    @classmethod
    def attach(cls, pid: int, fd: int, inode: int, generation: str, slots: int, where: str) -> Self:
        """A reader's side: read-only."""
        mapping = memfd.attach(pid, fd, inode, HEADER_BYTES)
        header = Header(mapping, generation, slots)
        header.check(where)
        try:
            locks = LockFile(memfd.proc_path(pid, fd), writable=False, what=f"remote weights {generation}")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise memfd.exporter_gone(pid) from error
        locks.try_shared(ATTACHED_BYTE)
        return cls(header, locks)

    @property
    def fd(self) -> int:
        """The exporter's descriptor number, for the handle file."""
        assert self._fd is not None, "only the exporter's side keeps the descriptor open"
        return self._fd.fileno()

    @property
    def inode(self) -> int:
        return self.locks.inode

    def readers_attached(self) -> bool:
        return self.locks.held_elsewhere(ATTACHED_BYTE)

    def owner_alive(self) -> bool:
        return self.locks.held_elsewhere(OWNER_BYTE)

    def slot_holders(self, slot: int) -> list[int]:
        """Pids that read or write this slot, as far as /proc may be read."""
        return self.locks.holders(FIRST_SLOT_BYTE + slot)

    def close(self) -> None:
        self.locks.close()
        if self._fd is not None:
            self._fd.close()
