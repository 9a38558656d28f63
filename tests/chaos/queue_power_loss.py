"""A power cut after any file operation of a run. Prints a summary as JSON.

Names reach the disk in order, as on a journalling file system; data that nobody synced may not: the files of every
prefix of the operations are rebuilt full, empty, half, zeroed and with a zeroed end, all of them or only the newest.
Only the trainer's checkpoint was synced. Every restart must work, and use every job once with the right data.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from queue_harness import Log, WrappedFiles, arguments, drain, leftovers, replay

from async_grpo.queue.filesystem import FOLDERS

JOBS, POISON = 5, (3,)

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "full": lambda data: data,
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "zero end": lambda data: data[: len(data) * 3 // 4] + bytes(len(data) - len(data) * 3 // 4),
}


class Operation(NamedTuple):
    name: str
    path: str
    data: bytes = b""
    consumed: frozenset[int] = frozenset()


def record(root: Path) -> list[Operation]:
    """The operations of an undisturbed run that change the disk."""
    root.mkdir(mode=0o700)
    made: list[Operation] = []

    def before(name: str, path: str, data: bytes) -> None:
        if name in ("create", "rename", "unlink", "make_folder"):
            made.append(Operation(name, path, data))

    def checkpointed(consumed: set[int]) -> None:
        made.append(Operation("checkpoint", "", consumed=frozenset(consumed)))

    log = Log(root.parent / "recorded.log")
    drain(root, JOBS, log, POISON, files=WrappedFiles(root, before), steps=2, on_checkpoint=checkpointed)
    return made


def rebuild(root: Path, operations: list[Operation], damage: Callable[[bytes], bytes], newest_only: bool) -> set[int]:
    """The directory after the power came back; returns what the checkpoint says."""
    root.mkdir(mode=0o700)
    for folder in FOLDERS:
        (root / folder).mkdir(mode=0o700)
    consumed: frozenset[int] = frozenset()
    newest = max((at for at, operation in enumerate(operations) if operation.name == "create"), default=-1)
    for at, operation in enumerate(operations):
        path = root / operation.path
        if operation.name == "create":
            path.write_bytes(damage(operation.data) if at == newest or not newest_only else operation.data)
        elif operation.name == "make_folder":
            path.mkdir(exist_ok=True)
        elif operation.name == "checkpoint":
            consumed = operation.consumed
        elif path.exists():
            path.rename(root / operation.data.decode()) if operation.name == "rename" else path.unlink()
    return set(consumed)


def restart(root: Path, consumed: set[int]) -> None:
    """Go on from the checkpoint to the end, and check."""
    log_path = root.parent / "log"
    log = Log(log_path)
    for seq in consumed:
        log.write("give up", seq=seq) if seq in POISON else log.write("apply", seq=seq, right=True)
    if consumed:
        ranges = [[seq, seq + 1] for seq in sorted(consumed)]
        (root.parent / f"{root.name}.checkpoint").write_text(json.dumps(ranges))
    drain(root, JOBS, log, POISON)
    told = replay(log_path, JOBS)
    assert told["applied"] == JOBS - len(POISON), told
    assert not leftovers(root), leftovers(root)


def main() -> None:
    options = arguments(every=1)
    operations = record(options.root / "recorded")
    cases = [
        (length, kind, newest_only)
        for length in range(len(operations) + 1)
        for kind in DAMAGE
        for newest_only in ((False,) if kind == "full" else (False, True))
    ]
    bad = []
    chosen = cases[options.seed % options.every :: options.every]
    for number, (length, kind, newest_only) in enumerate(chosen):
        root = options.root / str(number) / "q"
        root.parent.mkdir()
        try:
            restart(root, rebuild(root, operations[:length], DAMAGE[kind], newest_only))
        except Exception as error:  # noqa: BLE001 - a failed restart is what this looks for
            bad.append(f"{length} operations, {kind}: {type(error).__name__}: {error}")
    print(json.dumps({"operations": len(operations), "states": len(chosen), "bad": len(bad)}))
    if bad:
        print("FAILED:", *bad[:5], sep="\n", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
