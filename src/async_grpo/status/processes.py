"""One look at the processes of a run: who is alive, what each of them does, and who makes no progress.

What is alive is what holds its lock; what it does is what it last said of itself (`activity`). For how long something
goes on is told by the clock that all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.formatting import for_people
from async_grpo.queue.liveness import live_workers
from async_grpo.records import WorkerId
from async_grpo.rundir.locks import KernelLock
from async_grpo.rundir.paths import SERVER, RunDir
from async_grpo.telemetry import stalls
from async_grpo.telemetry.activity import ENDING, LOADING, STARTING, WAITING, ActivityRecord, boot_id, read_all


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """The parameter server or a worker. Shares are of the last minute; None: there is nothing to tell."""

    name: str  # "server", "dev1"
    alive: bool
    paused: bool  # stopped by a signal, SIGSTOP or Ctrl-Z
    pid: int
    device: str
    state: str  # starting, loading, waiting, training, publishing, evaluating, saving, generating, scoring, …
    state_s: float | None  # for how long
    waits_for: str
    waits_on: tuple[str, ...]
    jobs: tuple[dict[str, Any], ...]  # {"group", "phase", "seconds"}, oldest first
    text: str  # what it does, in words
    version: int | None
    jobs_done: int
    jobs_failed: int
    busy: float | None  # of a worker: not waiting; of the server: not waiting for rollouts
    no_progress_s: float | None  # set in a stall: neither it nor anyone it waits for got anything done for so long


class Holder(NamedTuple):
    """Who holds the lock of a process that is alive."""

    pid: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """All of them at one moment."""

    now: float  # monotonic
    records: Mapping[str, ActivityRecord]  # what each said of itself, by name; of this run, since the machine started
    alive: Mapping[str, Holder]  # by name
    server: ProcessView | None  # None: there is no sign of one
    workers: tuple[ProcessView, ...]  # the live ones, and those that died since the present server began

    def stalls(self) -> tuple[str, ...]:
        """One sentence for each process that is stalled."""
        return tuple(
            f"{view.name}: no progress for {for_people(view.no_progress_s)}: {self._explain(view)}"
            for view in (self.server, *self.workers)
            if view is not None and view.no_progress_s is not None
        )

    def _explain(self, view: ProcessView) -> str:
        text = stalls.explain(view.name, self.records, self.now)
        return f"{text}; it is paused by a signal: `kill -CONT {view.pid}` lets it go on" if view.paused else text


def look_at_processes(run: RunDir, run_id: str, now: float) -> Processes:
    """Reads locks and what the processes of this run have said of themselves; changes nothing."""
    boot = boot_id()
    records = {
        name: record
        for name, record in read_all(run.root).items()
        if record.run_id == run_id and record.boot_id == boot
    }
    alive = _alive(run)
    return Processes(
        now=now,
        records=records,
        alive=alive,
        server=_view(SERVER, records, alive, now),
        workers=_workers(records, alive, now),
    )


def _alive(run: RunDir) -> dict[str, Holder]:
    found = {}
    holder = KernelLock(run.lock).holder()
    if holder is not None and holder.get("role") == "parameter server":
        found[SERVER] = Holder(int(holder["pid"]), "")
    if (run.root / "alive").is_dir():
        found.update((worker.name, Holder(worker.pid, worker.torch_device)) for worker in live_workers(run.root))
    return found


def _workers(records: Mapping[str, ActivityRecord], alive: Mapping[str, Holder], now: float) -> tuple[ProcessView, ...]:
    began = records[SERVER].began_s if SERVER in records else now
    names = {name for name, record in records.items() if record.progress_s >= began and record.state != ENDING}
    workers = sorted(filter(None, map(WorkerId.parse, names | alive.keys())))
    found = (_view(str(worker), records, alive, now) for worker in workers)
    return tuple(view for view in found if view is not None)


def _view(
    name: str, records: Mapping[str, ActivityRecord], alive: Mapping[str, Holder], now: float
) -> ProcessView | None:
    """None for a process of which there is no sign."""
    record = records.get(name)
    holder = alive.get(name)
    if holder is not None and (record is None or record.pid != holder.pid):  # it has not said anything yet
        record = ActivityRecord(name=name, pid=holder.pid, device=holder.device, since_s=now, progress_s=now)
        records = {**records, name: record}
    if record is None:
        return None
    lives = holder is not None
    idle_s = now - stalls.last_progress_s(name, records)
    return ProcessView(
        name=name,
        alive=lives,
        paused=lives and _is_paused(record.pid),
        pid=record.pid,
        device=record.device,
        state=record.state,
        state_s=round(now - record.since_s, 3) if lives else None,
        waits_for=record.waits_for,
        waits_on=record.waits_on,
        jobs=_jobs(record, now) if lives else (),
        text=_text(record, lives, now),
        version=record.version,
        jobs_done=record.jobs_done,
        jobs_failed=record.jobs_failed,
        busy=_busy(record, now) if lives else None,
        no_progress_s=round(idle_s, 1) if lives and idle_s >= record.stall_after_s else None,
    )


def _jobs(record: ActivityRecord, now: float) -> tuple[dict[str, Any], ...]:
    return tuple({"group": job.seq, "phase": job.phase, "seconds": round(now - job.since_s, 3)} for job in record.jobs)


def _busy(record: ActivityRecord, now: float) -> float | None:
    waiting = record.share_of_last_minute([WAITING], now)
    return None if waiting is None or record.state in (STARTING, LOADING) else round(1.0 - waiting, 4)


def _text(record: ActivityRecord, lives: bool, now: float) -> str:
    if lives:
        return stalls.describe(record, now)
    return f"dead; it was {record.state}" if record.state != ENDING else "ended"


def _is_paused(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
