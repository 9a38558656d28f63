"""The control file: the shared header and the byte locks, in one small memfd for each generation.

The header is made of 64-byte little-endian records, each with a CRC32.

It is a hint and the locks are the truth: only a process that holds the slot's lock may
rely on its record. Record 0 says what this file is; record 1 + i says which version slot i has and whether it is whole.

    record 0                            record 1 + i
     0  8s  magic "AGIPCTRL"             0  16s generation
     8  u32 format version (1)          16  i64 version, -1 before the first
    12  u32 number of slots             24  u32 state: 0 EMPTY, 1 WRITING, 2 READY
    16  16s generation                  28  u32 zero
    32  28 zero bytes                   32  i64 time of the mark, ns since the epoch
    60  u32 CRC32 of bytes 0..59        40  20 zero bytes
                                        60  u32 CRC32 of bytes 0..59

There is no "current slot" field that could be torn: the newest is the READY record with the highest version.
"""

import enum
import struct
import time
import uuid
import zlib
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import NamedTuple, Self

from async_grpo_ipc import memfd
from async_grpo_ipc.errors import HeaderError
from async_grpo_ipc.locks import ATTACHED_BYTE, FIRST_SLOT_BYTE, OWNER_BYTE, LockFile, OwnedFd

MAGIC = b"AGIPCTRL"
HEADER_VERSION = 1
HEADER_BYTES = 4096
RECORD_BYTES = 64
MAX_SLOTS = HEADER_BYTES // RECORD_BYTES - 1

_FILE_RECORD = struct.Struct("<8sII16s28x")
_SLOT_RECORD = struct.Struct("<16sqI4xq20x")
_CRC = struct.Struct("<I")


class SlotState(enum.IntEnum):
    EMPTY = 0
    WRITING = 1
    READY = 2
    CORRUPT = 3  # never written: what a reader makes of a record whose checksum fails or that belongs elsewhere


_STATES = {int(state): state for state in (SlotState.EMPTY, SlotState.WRITING, SlotState.READY)}


class SlotRecord(NamedTuple):
    slot: int
    version: int
    state: SlotState
    marked_ns: int


class Header:
    """Reads, and for the exporter writes, the records in a mapping of the control file."""

    def __init__(self, control: mmap, generation: str, slots: int) -> None:
        self._control = control
        self._generation = bytes.fromhex(generation)
        self.slots = slots

    def initialise(self) -> None:
        """Write every record: all slots EMPTY."""
        self._write(0, _FILE_RECORD.pack(MAGIC, HEADER_VERSION, self.slots, self._generation))
        for slot in range(self.slots):
            self.mark(slot, SlotState.EMPTY, -1)

    def check(self, where: str) -> None:
        """Raise `HeaderError` unless record 0 is whole and belongs to this generation."""
        raw = self._read(0)
        if raw is None:
            raise HeaderError(
                f"The shared header of {where} fails its checksum: its memory was damaged. Restart the exporter."
            )
        magic, version, slots, generation = _FILE_RECORD.unpack(raw)
        if magic != MAGIC or version != HEADER_VERSION:
            raise HeaderError(
                f"The shared header of {where} has magic {magic!r} and format {version}, this package reads "
                f"{MAGIC!r} and {HEADER_VERSION}: the exporter runs another version of async_grpo_ipc. Use "
                "the same one on both sides."
            )
        if generation != self._generation or slots != self.slots:
            raise HeaderError(
                f"The shared header is of generation {generation.hex()} with {slots} slots, {where} names "
                f"{self._generation.hex()} with {self.slots}: the file is stale. Wait for the new exporter, "
                "or start one."
            )

    def mark(self, slot: int, state: SlotState, version: int) -> None:
        self._write(1 + slot, _SLOT_RECORD.pack(self._generation, version, state, time.time_ns()))

    def slot(self, slot: int) -> SlotRecord:
        raw = self._read(1 + slot)
        if raw is not None:
            generation, version, state, marked_ns = _SLOT_RECORD.unpack(raw)
            if generation == self._generation and state in _STATES:
                return SlotRecord(slot, version, _STATES[state], marked_ns)
        return SlotRecord(slot, -1, SlotState.CORRUPT, 0)

    def records(self) -> Iterator[SlotRecord]:
        return (self.slot(slot) for slot in range(self.slots))

    def newest(self) -> SlotRecord | None:
        """The whole version with the highest number: a hint, until its slot is locked and the record read again."""
        ready = [record for record in self.records() if record.state is SlotState.READY]
        return max(ready, key=lambda record: record.version, default=None)

    def find(self, version: int) -> SlotRecord | None:
        """The record of this version if it is whole: a hint, as `newest` is."""
        found = (record for record in self.records() if record.version == version)
        return next((record for record in found if record.state is SlotState.READY), None)

    def _write(self, index: int, body: bytes) -> None:
        self._control[index * RECORD_BYTES : (index + 1) * RECORD_BYTES] = body + _CRC.pack(zlib.crc32(body))

    def _read(self, index: int) -> bytes | None:
        raw = self._control[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        body = raw[: -_CRC.size]
        return body if _CRC.unpack(raw[-_CRC.size :])[0] == zlib.crc32(body) else None


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
        self._fd = fd

    @classmethod
    def create(cls, generation: str, slots: int) -> Self:
        """The exporter's side: an initialised header, and the owner lock held."""
        fd, mapping = memfd.create(f"control-{generation}", HEADER_BYTES)
        header = Header(mapping, generation, slots)
        header.initialise()
        locks = LockFile(f"/proc/self/fd/{fd.fileno()}", writable=True, what=f"weight exporter {generation}")
        locks.try_lock(OWNER_BYTE)
        return cls(header, locks, fd)

    @classmethod
    def attach(
        cls, pid: int, fd: int, inode: int, generation: str, slots: int, where: str, *, reader: bool = True
    ) -> Self:
        """A reader's side, read-only; with `reader=False` only to look, and the exporter does not count it."""
        mapping = memfd.attach(pid, fd, inode, HEADER_BYTES)
        header = Header(mapping, generation, slots)
        header.check(where)
        try:
            locks = LockFile(memfd.proc_path(pid, fd), writable=False, what=f"remote weights {generation}")
        except (FileNotFoundError, ProcessLookupError) as error:
            raise memfd.exporter_gone(pid) from error
        if reader and not locks.try_lock(ATTACHED_BYTE, shared=True):
            locks.close()
            raise memfd.exporter_gone(pid)  # it is just giving its memory back
        return cls(header, locks)

    @property
    def fd(self) -> int:
        """The exporter's descriptor number, for the handle file."""
        assert self._fd is not None, "only the exporter's side keeps the descriptor open"
        return self._fd.fileno()

    @property
    def inode(self) -> int:
        return self.locks.inode

    def refuse_readers(self) -> bool:
        """Let no reader attach any more, for good. False where there is one."""
        return self.locks.try_lock(ATTACHED_BYTE)

    def owner_alive(self) -> bool:
        return self.locks.held_elsewhere(OWNER_BYTE)

    def slot_holders(self, slot: int, among: Sequence[int] | None = None) -> list[int]:
        """Pids (of `among`, or of all) that read or write this slot, as far as /proc may be read."""
        return self.locks.holders(FIRST_SLOT_BYTE + slot, among)

    def close(self) -> None:
        self.locks.close()
        if self._fd is not None:
            self._fd.close()
