"""`python -m async_grpo.checks.doctor.lock_peer`: the second process of the doctor's trials of locks and renames.

It answers each line of its input with one line, works in its current folder, and is killed in the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from async_grpo.rundir.locks import KernelLock
from async_grpo_ipc.locks import LockFile

LOCK, OFD = "lock", "ofd"  # the file of a KernelLock, which the queue has, and of a lock as the weights have
FIRST_BYTE = 0


def rename_all(folder: Path, to: str, count: int) -> int:
    """Take each of `count` files by renaming it, as a worker takes a job; returns how many were had."""
    had = 0
    for number in range(count):
        try:
            (folder / f"prize{number}").rename(folder / f"{to}{number}")
            had += 1
        except FileNotFoundError:
            continue
    return had


def main() -> None:
    lock, ofd = KernelLock(Path(LOCK)), LockFile(OFD, writable=True, what="the doctor's file")
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "try":
            answer: object = {
                "queue_lock": lock.try_acquire(),
                "holder": (lock.holder() or {}).get("pid"),
                "weights_lock": ofd.try_exclusive(FIRST_BYTE),
            }
        else:
            answer = rename_all(Path(), "theirs", int(number))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
