"""One look at a run, from its files and the kernel's locks alone: live, dead, finished, or none at all.

Nothing here imports torch, waits, or changes anything. What is alive is what holds its lock; for how long something
goes on is told by the clock that all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_grpo import bottleneck, metrics_tail, stall
from async_grpo import run_dir as runs
from async_grpo.activity import (
    BUSY_WORKER,
    ENDING,
    LOADING,
    SCORING,
    SERVER,
    STARTING,
    WAITING,
    ActivityRecord,
    boot_id,
    read_all,
)
from async_grpo.errors import RunDirError
from async_grpo.locks import KernelLock
from async_grpo.metrics_tail import Rates
from async_grpo.queue_liveness import live_workers
from async_grpo.queue_names import COMPLETE, PENDING, PROCESSING, parse_name, parse_set_aside
from async_grpo.queue_names import FAILED as FAILED_JOB
from async_grpo.queue_view import quarantined
from async_grpo.run_dir import RunDir, RunState
from async_grpo.summary import next_command
from async_grpo.wording import counted, for_people
from async_grpo_ipc.errors import IPCError

DEAD, TRAINING = "dead", "training"  # beside the states of run.json, STARTING, LOADING and ENDING
FORMAT = 1  # of the JSON
LONG_ENOUGH_S = 5.0  # of training, to speak of a bottleneck


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


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView:
    """Prompt groups by state; `oldest_*` is about the open one with the lowest number."""

    pending: int
    processing: int
    complete: int
    oldest_group: int | None = None
    oldest_state: str = ""
    oldest_s: float | None = None  # since it was issued, or finished; by the files' times, for people


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    """A slot of the published weights."""

    slot: int
    state: str
    version: int | None
    newest: bool
    held_by: tuple[str, ...]  # names of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Everything that `status` shows. `asdict` of it is what `status --json` prints, plus `format`."""

    run_dir: str
    run_id: str
    state: str  # starting, loading, training, ending, dead, finished, stopped, failed
    sentence: str  # the state in words, with what to do
    config: str
    started: str  # for people
    num_workers: int  # that a launcher started; 0: by hand
    step: int
    total_steps: int | None
    eta_s: float | None
    server: ProcessView | None
    workers: tuple[ProcessView, ...]
    queue: QueueView
    weight_version: int | None
    slots: tuple[SlotView, ...]  # empty without details, and while nobody publishes
    rates: Rates | None
    trainer_waits: float | None  # share of the last minute
    workers_busy: float | None  # mean share of the last minute
    bottleneck: str
    stalls: tuple[str, ...]  # one sentence for each process that is stalled
    jobs_quarantined: int
    quarantined: tuple[dict[str, Any], ...]  # {"group", "attempt", "kind", "file", "reason"}; with details only
    summary: dict[str, Any] | None  # summary.json of a run that has ended

    @property
    def live(self) -> bool:
        """Whether a parameter server is alive, or expected."""
        return self.state in (STARTING, LOADING, TRAINING, ENDING)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def look(root: Path, *, details: bool = True) -> RunView:
    """The run in `root` as it is now. `details`: also leases (a look into /proc) and the reasons of quarantined groups.

    Raises:
        RunDirError: there is no run to look at, in a sentence.
    """
    run = RunDir(root)
    try:
        return _look(run, details=details)
    except PermissionError as error:
        raise RunDirError(
            f"{error.filename or run.root} may not be read by this user (uid {os.geteuid()}): a run directory is its "
            "owner's alone. Ask as the user who started the run."
        ) from error


def _look(run: RunDir, *, details: bool) -> RunView:
    state = _state_of(run)
    now, boot = time.monotonic(), boot_id()
    records = {
        name: record
        for name, record in read_all(run.root).items()
        if record.run_id == state.run_id and record.boot_id == boot
    }
    alive = _alive(run)
    server = _process(SERVER, records, alive, now)
    workers = _workers(records, alive, now)
    record = records.get(SERVER)
    what = _what_state(state, server, record)
    summary = _read_json(run.summary) if state.state != runs.RUNNING else None
    step, total = _progress(state, record, summary)
    rates = shares = None
    if what == TRAINING and record is not None:
        rates = metrics_tail.rates(metrics_tail.last_steps(run.metrics, now, record.began_s), now)
        shares = _shares(records, workers, now)
    stalls = tuple(
        f"{view.name}: no progress for {for_people(view.no_progress_s)}: {_explain(view, records, now)}"
        for view in (server, *workers)
        if view is not None and view.no_progress_s is not None
    )
    return RunView(
        run_dir=str(run.root),
        run_id=state.run_id,
        state=what,
        sentence=_sentence(what, state, server, workers, run),
        config=state.config,
        started=state.started,
        num_workers=state.num_workers,
        step=step,
        total_steps=total,
        eta_s=_eta_s(step, total, rates),
        server=server,
        workers=workers,
        queue=_queue(run),
        weight_version=record.version if record is not None else None,
        slots=_slots(run, alive) if details and what in (TRAINING, ENDING) else (),
        rates=rates,
        trainer_waits=shares.trainer_waits if shares else None,
        workers_busy=shares.workers_busy if shares else None,
        bottleneck=_bottleneck(shares, server, workers) if what == TRAINING else "",
        stalls=stalls,
        jobs_quarantined=_count_given_up(run),
        quarantined=_quarantined(run) if details else (),
        summary=summary,
    )


# --- the run


def _state_of(run: RunDir) -> RunState:
    if not run.root.exists():
        raise RunDirError(f"{run.root} does not exist, so no run has begun there (yet). Name the run's --run-dir.")
    if not run.root.is_dir():
        raise RunDirError(f"{run.root} is a file. Name a run directory, such as worker/.")
    state = run.read_state()
    if state is not None:
        return state
    if (run.root / "alive").is_dir() and (waiting := live_workers(run.root)):
        names = ", ".join(worker.name for worker in waiting)
        raise RunDirError(
            f"{run.root} holds no run yet: {names} wait for a parameter server. Start one with the same --run-dir."
        )
    raise RunDirError(f"{run.root} is no run directory: it has no run.json. Name one, such as worker/.")


def _what_state(state: RunState, server: ProcessView | None, record: ActivityRecord | None) -> str:
    alive = server is not None and server.alive
    if state.state != runs.RUNNING:
        return ENDING if alive else state.state
    if server is None:
        return STARTING
    if not alive:
        return DEAD
    if server.state in (STARTING, ENDING):
        return server.state
    return TRAINING if record is not None and record.step is not None else LOADING


def _sentence(
    what: str, state: RunState, server: ProcessView | None, workers: Sequence[ProcessView], run: RunDir
) -> str:
    """What the state means, and what to do about it."""
    alive = sum(worker.alive for worker in workers)
    waiting = f" {counted(alive, 'worker')} wait{'s' if alive == 1 else ''} for it to come back." if alive else ""
    if what == STARTING:
        return "no parameter server is alive yet. If none comes, what prepared this run has ended: start it again."
    if what == LOADING:
        return (
            f"the parameter server is loading {Path(state.config).name}; workers load meanwhile, or wait for weights."
        )
    if what == DEAD:
        assert server is not None
        return (
            f"the parameter server (pid {server.pid}, last seen {server.state}) is gone without a word: it was killed, "
            f"or the machine went down.{waiting} To go on from the last checkpoint: {next_command(runs.STOPPED, run)}"
        )
    if what == runs.FAILED:
        return f"the run failed; the end of {run.server_log} says why. To go on: {next_command(what, run)}"
    if what == runs.STOPPED:
        return f"the run was stopped. To go on: {next_command(what, run)}"
    if what == runs.FINISHED:
        return f"the run has finished. Next: {next_command(what, run)}"
    if what == ENDING:
        return "the run is ending: the last checkpoint and the summary are written."
    return "the run is training." if alive else "the run has no live worker: start one with `async-grpo worker`."


def _progress(
    state: RunState, record: ActivityRecord | None, summary: Mapping[str, Any] | None
) -> tuple[int, int | None]:
    """Optimizer steps done, and to do in all as far as that is known."""
    total = record.total_steps if record is not None else None
    if summary is not None and isinstance(summary.get("steps"), int):
        return summary["steps"], total
    if record is not None and record.step is not None:
        return record.step, total
    return state.step, total


def _eta_s(step: int, total: int | None, rates: Rates | None) -> float | None:
    if total is None or rates is None or rates.steps_per_second <= 0:
        return None
    return (total - step) / rates.steps_per_second


def _read_json(path: Path) -> dict[str, Any] | None:
    """An object that was written whole, or None."""
    try:
        data = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return data if isinstance(data, dict) else None


# --- its processes


def _alive(run: RunDir) -> dict[str, tuple[int, str]]:
    """pid and device of every process that holds its lock, by name."""
    found = {}
    holder = KernelLock(run.lock).holder()
    if holder is not None and holder.get("role") == "parameter server":
        found[SERVER] = (int(holder["pid"]), "")
    if (run.root / "alive").is_dir():
        found.update((worker.name, (worker.pid, worker.torch_device)) for worker in live_workers(run.root))
    return found


def _process(
    name: str, records: Mapping[str, ActivityRecord], alive: Mapping[str, tuple[int, str]], now: float
) -> ProcessView | None:
    """None for a process of which there is no sign."""
    record = records.get(name)
    if name in alive and (record is None or record.pid != alive[name][0]):
        record = ActivityRecord(name=name, pid=alive[name][0], device=alive[name][1], since_s=now, progress_s=now)
        records = {**records, name: record}
    if record is None:
        return None
    lives = name in alive
    idle_s = now - stall.last_progress_s(name, records)
    waiting = record.share_of_last_minute([WAITING], now)
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
        jobs=tuple(
            {"group": job.seq, "phase": job.phase, "seconds": round(now - job.since_s, 3)}
            for job in record.jobs
            if lives
        ),
        text=_text(record, lives, now),
        version=record.version,
        jobs_done=record.jobs_done,
        jobs_failed=record.jobs_failed,
        busy=round(1.0 - waiting, 4)
        if lives and waiting is not None and record.state not in (STARTING, LOADING)
        else None,
        no_progress_s=round(idle_s, 1) if lives and idle_s >= record.stall_after_s else None,
    )


def _workers(
    records: Mapping[str, ActivityRecord], alive: Mapping[str, tuple[int, str]], now: float
) -> tuple[ProcessView, ...]:
    """The live ones, and those that died since the present parameter server began."""
    began = records[SERVER].began_s if SERVER in records else now
    names = {name for name, record in records.items() if record.progress_s >= began and record.state != ENDING}
    found = [_process(name, records, alive, now) for name in (names | alive.keys()) - {SERVER}]
    return tuple(sorted((view for view in found if view is not None), key=lambda view: int(view.name[3:])))


def _text(record: ActivityRecord, lives: bool, now: float) -> str:
    if lives:
        return stall.describe(record, now)
    return f"dead; it was {record.state}" if record.state != ENDING else "ended"


def _explain(view: ProcessView, records: Mapping[str, ActivityRecord], now: float) -> str:
    text = stall.explain(view.name, records, now)
    return f"{text}; it is paused by a signal: `kill -CONT {view.pid}` lets it go on" if view.paused else text


def _is_paused(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


# --- its queue and weights


def _queue(run: RunDir) -> QueueView:
    """By one listing; files that come and go meanwhile may be missed, as in `ls`."""
    try:
        entries = [entry.name for entry in os.scandir(run.root / "queue")]
    except (FileNotFoundError, NotADirectoryError):
        return QueueView(pending=0, processing=0, complete=0)
    names = sorted(filter(None, map(parse_name, entries)))
    states = [name.state for name in names]
    counts = {state: states.count(state) for state in (PENDING, PROCESSING, COMPLETE)}
    oldest = names[0] if names else None
    return QueueView(
        pending=counts[PENDING],
        processing=counts[PROCESSING],
        complete=counts[COMPLETE],
        oldest_group=oldest.seq if oldest else None,
        oldest_state=oldest.state if oldest else "",
        oldest_s=_file_age_s(run.root / "queue" / str(oldest)) if oldest else None,
    )


def _file_age_s(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat(follow_symlinks=False).st_mtime), 3)
    except FileNotFoundError:  # it went on
        return None


def _count_given_up(run: RunDir) -> int:
    try:
        entries = [parse_set_aside(entry.name) for entry in os.scandir(run.root / "quarantine")]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return sum(entry is not None and entry.kind == FAILED_JOB for entry in entries)


def _quarantined(run: RunDir) -> tuple[dict[str, Any], ...]:
    if not (run.root / "quarantine").is_dir():
        return ()
    return tuple(
        {"group": aside.seq, "attempt": aside.attempt, "kind": aside.kind, "file": aside.name, "reason": aside.reason}
        for aside in quarantined(run.root)
    )


def _slots(run: RunDir, alive: Mapping[str, tuple[int, str]]) -> tuple[SlotView, ...]:
    from async_grpo_ipc.slots import look_at_slots

    names = {pid: name for name, (pid, _) in alive.items()}
    try:
        slots = look_at_slots(run.weights_handle, list(names))
    except IPCError:  # nothing is published yet, or no more
        return ()
    return tuple(
        SlotView(
            slot=slot.number,
            state=slot.state,
            version=slot.version if slot.version >= 0 else None,
            newest=slot.newest,
            held_by=tuple(names[pid] for pid in slot.holders),
        )
        for slot in slots
    )


# --- how it goes


def _shares(
    records: Mapping[str, ActivityRecord], workers: Sequence[ProcessView], now: float
) -> bottleneck.Shares | None:
    """None until there are a few seconds of training to speak of."""
    server = records.get(SERVER)
    if server is None or server.step is None:
        return None
    waits = server.share_of_last_minute([WAITING], now)
    at_work = [
        records[worker.name]
        for worker in workers
        if worker.alive and worker.busy is not None and worker.name in records
    ]
    busy = [record.share_of_last_minute(BUSY_WORKER, now) or 0.0 for record in at_work]
    scoring = [record.share_of_last_minute([SCORING], now) or 0.0 for record in at_work]
    if waits is None or not at_work:
        return None
    return bottleneck.Shares(
        window_s=min(now - server.minute_ago.at_s, 60.0),
        workers=len(at_work),
        trainer_waits=round(waits, 4),
        workers_busy=round(sum(busy) / len(busy), 4),
        workers_scoring=round(sum(scoring) / len(scoring), 4),
        max_staleness=server.max_staleness,
        on_cpu=server.device == "cpu",
    )


def _bottleneck(shares: bottleneck.Shares | None, server: ProcessView | None, workers: Sequence[ProcessView]) -> str:
    if not any(worker.alive for worker in workers):
        return "no worker is alive: start one with `async-grpo worker`"
    if server is not None and server.no_progress_s is not None:
        return "nothing moves: see who makes no progress"
    if shares is None or shares.window_s < LONG_ENOUGH_S:
        return "it has only just begun: too early to say"
    return bottleneck.sentence(shares)
