"""What a queue of tasks has started and how each task ended: one line an event, on disk before the next event."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from async_grpo.rundir.files import LineFile
from async_grpo.rundir.shape import shaped_lines
from async_grpo.setup.process import is_alive, within

WAITING, RUNNING, FINISHED, FAILED, STOPPED = "waiting", "running", "finished", "failed", "stopped"
BLOCKED = "blocked"  # it needs a task that failed
LEDGER = "slots.jsonl"  # its file, in the folder of a sweep or an experiment
_START = 19  # of the fields of /proc/PID/stat after the name: field 22 in proc(5)
POLL_S = 0.05
KILL_WAIT_S = 30.0  # a process that SIGKILL does not end by then hangs in the kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The newest that is known of a task."""

    task: str
    state: str
    place: str = ""
    pid: int = 0
    born: float = 0.0  # when that process began: another one may get its pid later
    seconds: float = 0.0  # of all its processes
    code: int | None = None  # exit code; negative: the signal that killed it
    why: str = ""  # it is not finished
    log: str = ""
    last_words: str = ""  # of one that failed
    peak_bytes: int = 0  # the most memory that it had; 0: unknown
    lost: int = 0  # how often its process was lost with the machine that it ran on


class Ledger(LineFile):
    """The records in a file. One process at a time writes it; its owner holds a lock.

    >>> ledger = Ledger(Path("slots.jsonl"))
    >>> ledger.put(Record(task="a", state=FINISHED))
    >>> read(Path("slots.jsonl"))["a"].state
    'finished'
    """

    def __init__(self, path: Path) -> None:
        self.records = read(path)
        super().__init__(path)

    def put(self, record: Record) -> None:
        self.records[record.task] = record
        self.append(json.dumps(asdict(record)))

    def change(self, task: str, **changes: object) -> Record:
        self.put(replace(self.records[task], **changes))  # type: ignore[arg-type]  # names are checked by replace()
        return self.records[task]


def read(path: Path) -> dict[str, Record]:
    """The newest record of each task, by name."""
    return {record.task: record for record in shaped_lines(Record, path)}


def born(pid: int) -> float:
    """When this process began, in seconds since the machine did; 0 if there is none.

    A time of day would not do: psutil reckons it from the clock, and by a clock that was set every process is another.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return int(stat.rpartition(b")")[2].split()[_START]) / os.sysconf("SC_CLK_TCK")


def end_leftovers(records: Iterable[Record], *, grace_s: float, say: Callable[[str], None]) -> None:
    """End the processes that a killed queue has left: SIGTERM, and SIGKILL after the grace. Returns when they are gone.

    They end what they have started themselves; what is left of that after the grace is killed with them. A process that
    has the pid of a record, but began at another time, is somebody else's and is left alone.
    """
    left = [found for record in records if record.state == RUNNING and (found := _same_process(record)) is not None]
    if not left:
        return
    started = [child for process in left for child in _started_by(process)]
    say(f"ending what the killed queue has left: pid {', '.join(str(process.pid) for process in left)}")
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    deaf = _alive_after([*left, *started], grace_s)
    for process in deaf:
        say(f"killing pid {process.pid}: it did not end in {grace_s:g} s")
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _alive_after(deaf, KILL_WAIT_S)


def _alive_after(processes: Sequence[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended by then."""
    within(timeout_s, lambda: not any(map(is_alive, processes)), POLL_S)
    return [one for one in processes if is_alive(one)]


def _started_by(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _same_process(record: Record) -> psutil.Process | None:
    try:
        process = psutil.Process(record.pid)
    except (psutil.NoSuchProcess, ValueError):
        return None
    return process if born(record.pid) == record.born and is_alive(process) else None
