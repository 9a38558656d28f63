"""One look at the processes of a run: which are alive, what each of them does, and which make no progress.

A process is alive while it holds its lock; what it does is what it last wrote about itself (`telemetry.activity`).
Durations are by the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.formatting import for_people
from async_grpo.queue.liveness import live_workers
from async_grpo.records import WorkerId
from async_grpo.rundir.locks import server_lock
from async_grpo.rundir.paths import SERVER, RunDir
from async_grpo.telemetry import stalls
from async_grpo.telemetry.activity import ENDING, LOADING, STARTING, WAITING, ActivityRecord, read_all
from async_grpo_ipc.handle import boot_id

SERVING = ("parameter server", "evaluation")  # roles; a process that prepares a run has the server's lock, too


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """The parameter server or a worker. Shares are of the last minute; None: unknown."""

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
    no_progress_s: float | None  # in a stall: for how long neither it nor any process it waits for got anything done


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """All of them at one moment."""

    now: float  # monotonic
    records: Mapping[str, ActivityRecord]  # by name; of this run, since the machine started
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
        return f"{text}; it is paused by a signal: `kill -CONT {view.pid}` resumes it" if view.paused else text


def look_at_processes(run: RunDir, run_id: str, now: float) -> Processes:
    """Read the locks and the activity of the processes of this run; changes nothing."""
    boot = boot_id()
    records = {
        name: record
        for name, record in read_all(run.root).items()
        if record.run_id == run_id and record.boot_id == boot
    }
    began = records[SERVER].began_s if SERVER in records else now
    alive = _alive(run, now)
    for name, holder in alive.items():
        if name not in records or records[name].pid != holder.pid:  # it has not written anything yet
            records[name] = holder
    views = {name: _view(record, name in alive, records, now) for name, record in records.items()}
    workers = (views[str(worker)] for worker in sorted(filter(None, map(WorkerId.parse, views))))
    shown = tuple(
        view for view in workers if view.alive or (view.state != ENDING and records[view.name].progress_s >= began)
    )
    return Processes(now=now, records=records, server=views.get(SERVER), workers=shown)


def _alive(run: RunDir, now: float) -> dict[str, ActivityRecord]:
    """The processes that hold the locks, by name."""
    found: dict[str, ActivityRecord] = {}
    holder = server_lock(run.root).holder()
    if holder is not None and holder.get("role") in SERVING:
        found[SERVER] = ActivityRecord(name=SERVER, pid=int(holder["pid"]), since_s=now, progress_s=now)
    for worker in live_workers(run.root):
        found[worker.name] = ActivityRecord(
            name=worker.name, pid=worker.pid, device=worker.torch_device, since_s=now, progress_s=now
        )
    return found


def _view(record: ActivityRecord, alive: bool, records: Mapping[str, ActivityRecord], now: float) -> ProcessView:
    idle_s = now - stalls.last_progress_s(record.name, records)
    jobs = ({"group": job.seq, "phase": job.phase, "seconds": round(now - job.since_s, 3)} for job in record.jobs)
    return ProcessView(
        name=record.name,
        alive=alive,
        paused=alive and _is_paused(record.pid),
        pid=record.pid,
        device=record.device,
        state=record.state,
        state_s=round(now - record.since_s, 3) if alive else None,
        waits_for=record.waits_for,
        waits_on=record.waits_on,
        jobs=tuple(jobs) if alive else (),
        text=stalls.describe(record, now) if alive else _last_words(record),
        version=record.version,
        jobs_done=record.jobs_done,
        jobs_failed=record.jobs_failed,
        busy=_busy(record, now) if alive else None,
        no_progress_s=round(idle_s, 1) if alive and idle_s >= record.stall_after_s else None,
    )


def _busy(record: ActivityRecord, now: float) -> float | None:
    waiting = record.share_of_last_minute([WAITING], now)
    return None if waiting is None or record.state in (STARTING, LOADING) else round(1.0 - waiting, 4)


def _last_words(record: ActivityRecord) -> str:
    return f"dead; it was {record.state}" if record.state != ENDING else "ended"


def _is_paused(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
