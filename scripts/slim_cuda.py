"""Leave in CUDA libraries only the code that one architecture loads, so that they pack well.

    python scripts/slim_cuda.py LIBRARY ... [--sm 90]

The compiler puts a container of entries into a library for each source file: machine code for each architecture, and
PTX, which the driver compiles for later ones. Machine code runs on its own architecture alone, so of each container
these entries stay: the machine code for `--sm`; without any, the newest PTX that the driver can compile for it; without
that, the smallest entry, so that the container still says that it has nothing for this GPU. They move to the
container's beginning, its header says their size, and zeros fill the rest: the library has its size and its offsets.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CONTAINER = struct.Struct("<IHHQ")  # magic number, version, bytes of this header, bytes of the entries behind it
MAGIC, VERSION = 0xBA55ED50, 1
ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of the code behind it, architecture
PTX, MACHINE_CODE = 1, 2


@dataclass(frozen=True, slots=True)
class Entry:
    kind: int
    architecture: int  # 90: sm_90, and sm_90a
    code: bytes  # with its header


def slim(library: bytearray, sm: int) -> int:
    """Remove what `sm` does not load. Returns how many bytes that was.

    Raises:
        ValueError: a container is not as this script knows them.
    """
    removed = 0
    for start, size in containers(library):
        kept = b"".join(entry.code for entry in chosen(list(entries(library, start, start + size)), sm))
        library[start : start + size] = kept.ljust(size, b"\0")
        CONTAINER.pack_into(library, start - CONTAINER.size, MAGIC, VERSION, CONTAINER.size, len(kept))
        removed += size - len(kept)
    return removed


def containers(library: bytearray) -> Iterator[tuple[int, int]]:
    """Where the entries of each container begin, and how many bytes they are."""
    at = 0
    while (at := library.find(MAGIC.to_bytes(4, "little"), at)) >= 0:
        at += CONTAINER.size
        _, version, header, size = CONTAINER.unpack_from(library, at - CONTAINER.size)
        if (version, header) == (VERSION, CONTAINER.size) and at + size <= len(library):
            yield at, size
            at += size


def entries(library: bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header, size, architecture = ENTRY.unpack_from(library, at)
        if kind not in (PTX, MACHINE_CODE) or header < ENTRY.size or at + header + size > end:
            raise ValueError(f"the entry at {at:#x} has kind {kind} and {header} + {size} bytes: not a known layout")
        yield Entry(kind, architecture, bytes(library[at : at + header + size]))
        at += header + size


def chosen(found: list[Entry], sm: int) -> list[Entry]:
    if own := [entry for entry in found if (entry.kind, entry.architecture) == (MACHINE_CODE, sm)]:
        return own
    if compilable := [entry for entry in found if entry.kind == PTX and entry.architecture <= sm]:
        return [max(compilable, key=lambda entry: entry.architecture)]
    return [min(found, key=lambda entry: len(entry.code))] if found else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", metavar="LIBRARY", nargs="+", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="the architecture (90: H100 and H200)")
    args = parser.parse_args()
    for path in args.libraries:
        library = bytearray(path.read_bytes())
        removed = slim(library, args.sm)
        path.write_bytes(library)
        print(f"{path.name}: {removed >> 20} of {len(library) >> 20} MiB are zeros now")


if __name__ == "__main__":
    main()
