"""What a command does around a queue that it runs: it has the folder alone, signals stop it, it gives a code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from async_grpo.errors import RunDirError
from async_grpo.formatting import printable
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock, describe_holder
from async_grpo.rundir.summary import program
from async_grpo.setup.output import survive_lost_output
from async_grpo_experiments.slots.ledger import BLOCKED, FAILED, FINISHED, Record


@contextmanager
def held_alone(lock_file: Path, *, role: str, way_out: str) -> Iterator[None]:
    """Make the folder of this file, and let one process at a time have it. `RunDirError` names the one that has it."""
    survive_lost_output()
    lock_file.parent.parent.mkdir(parents=True, exist_ok=True)
    make_folder(lock_file.parent)
    lock = KernelLock(lock_file)
    if not lock.try_acquire({"role": role}):
        raise RunDirError(
            f"{lock_file.parent} is in use by another {role} ({describe_holder(lock.holder())}). {way_out}"
        )
    with lock:
        yield


def stopped_by_signals(stop: Callable[..., object]) -> ExitStack:
    """Have SIGINT and SIGTERM call `stop` to the end of the process; where this is a block's, to the end of the block.

    A command keeps it to its end: a signal behind its last line would end it, with another code, when all is done.
    """
    before = ExitStack()
    for number in (signal.SIGINT, signal.SIGTERM):
        before.callback(signal.signal, number, signal.signal(number, stop))
    return before


def conclude(who: str, records: Mapping[str, Record], *, stopped: bool, go_on: str) -> int:
    """Print why tasks failed, with their last words, and which command continues what has not finished.

    Returns the exit code: 0, 1 if a task failed, or 130 if a stop was asked for and left one undone.
    """
    for what, record in records.items():
        if record.state == FAILED:
            print(printable(f"[{who}] {what} failed ({record.why}). Its last words:"), file=sys.stderr)
            print(printable(record.last_words or record.why), file=sys.stderr)
    states = {record.state for record in records.values()}
    if states - {FINISHED}:
        print(f"continue: {program()} {go_on}", flush=True)
    if states & {FAILED, BLOCKED}:
        return 1
    return 130 if stopped and states - {FINISHED} else 0  # as a shell has it for Ctrl-C
