"""One look at a run, live, dead or ended, from its files and the kernel's locks alone.

Nothing here imports torch, waits, or changes anything.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import BadFileError, RunDirError
from async_grpo.queue.listing import QueueCounts, open_jobs, quarantined, queue_counts
from async_grpo.rundir.paths import RUNNING, SERVER, RunDir
from async_grpo.rundir.summary import read_figures
from async_grpo.status import diagnosis
from async_grpo.status.processes import Processes, ProcessView, look_at_processes
from async_grpo.telemetry import run_log
from async_grpo.telemetry.activity import ENDING, TRAINING, ActivityRecord
from async_grpo.telemetry.nodes_file import NodeRecord, read_nodes
from async_grpo.telemetry.ranks_file import Beat, read_ranks
from async_grpo.telemetry.run_log import Rates
from async_grpo_ipc.errors import IPCError

FORMAT = 1  # of the JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotView:
    slot: int
    state: str
    version: int | None
    newest: bool
    held_by: tuple[str, ...]  # names of processes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroups:
    """Prompt groups by state; `oldest_*` is about the open one with the lowest number."""

    pending: int
    processing: int
    complete: int
    oldest_group: int | None = None
    oldest_state: str = ""
    oldest_s: float | None = None  # since it was issued, or finished; by the file's time, for people


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
    answered: int | None  # problems of an evaluation without training
    problems: int | None
    server: ProcessView | None
    workers: tuple[ProcessView, ...]
    queue: OpenGroups
    weight_version: int | None
    slots: tuple[SlotView, ...]  # empty without details, and while nothing is published
    rates: Rates | None
    trainer_waits: float | None  # share of the last minute
    workers_busy: float | None  # mean share of the last minute
    bottleneck: str
    nodes: tuple[NodeRecord, ...]  # other machines of the run
    ranks: dict[str, Beat]  # of the trainer, where it is on several machines, by name
    stalls: tuple[str, ...]  # one sentence for each process that is stalled
    tips: str  # the warning that the policy runs away from its rollouts; empty without one
    jobs_quarantined: int
    quarantined: tuple[dict[str, Any], ...]  # {"group", "attempt", "kind", "file", "reason"}; with details only
    summary: dict[str, Any] | None  # summary.json of a run that has ended

    @property
    def live(self) -> bool:
        """Whether a parameter server is alive, or expected."""
        return self.state in diagnosis.LIVE

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
    state = diagnosis.state_of(run)
    now = time.monotonic()
    processes = look_at_processes(run, state.run_id, now)
    condition = diagnosis.condition(state, processes)
    counts = queue_counts(run.root)
    training = condition == TRAINING
    server = processes.records.get(SERVER, ActivityRecord())
    summary = _read_summary(run) if state.state != RUNNING else None
    step = summary.get("steps", state.step) if summary else state.step if server.step is None else server.step
    rates = run_log.rates(run_log.last_steps(run.metrics, now, server.began_s), now) if training else None
    by_hand = not (state.plan.num_workers or state.plan.launch.ray)
    shares = diagnosis.measure(processes, by_hand=by_hand) if training else None
    return RunView(
        run_dir=str(run.root),
        run_id=state.run_id,
        state=condition,
        sentence=diagnosis.sentence(condition, state, processes, run),
        config=str(state.plan.config),
        started=state.started,
        num_workers=state.plan.num_workers,
        step=step,
        total_steps=server.total_steps,
        eta_s=server.answered_eta_s if server.problems else _eta_s(step, server.total_steps, rates),
        answered=server.answered,
        problems=server.problems,
        server=processes.server,
        workers=processes.workers,
        queue=_open_groups(run.root, counts),
        weight_version=server.version,
        slots=_slots(run, processes) if details and condition in (TRAINING, ENDING) else (),
        rates=rates,
        trainer_waits=shares.trainer_waits if shares else None,
        workers_busy=shares.workers_busy if shares else None,
        bottleneck=diagnosis.bottleneck(processes, shares, state) if training else "",
        nodes=nodes.nodes if (nodes := read_nodes(run.nodes)) is not None else (),
        ranks=read_ranks(run.ranks),
        stalls=processes.stalls(),
        tips=state.tips,
        jobs_quarantined=counts.quarantined,
        quarantined=_quarantined(run) if details else (),
        summary=summary,
    )


def _open_groups(root: Path, counts: QueueCounts) -> OpenGroups:
    oldest = next(iter(open_jobs(root)), None)
    return OpenGroups(
        pending=counts.pending,
        processing=counts.processing,
        complete=counts.complete,
        oldest_group=oldest.seq if oldest else None,
        oldest_state=oldest.state if oldest else "",
        oldest_s=_age_s(root / "queue" / str(oldest)) if oldest else None,
    )


def _age_s(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat(follow_symlinks=False).st_mtime), 3)
    except FileNotFoundError:  # it was renamed meanwhile
        return None


def _eta_s(step: int, total: int | None, rates: Rates | None) -> float | None:
    if total is None or rates is None or rates.steps_per_second <= 0:
        return None
    return (total - step) / rates.steps_per_second


def _read_summary(run: RunDir) -> dict[str, Any] | None:
    try:
        return read_figures(run.summary)
    except (FileNotFoundError, BadFileError):
        return None


def _quarantined(run: RunDir) -> tuple[dict[str, Any], ...]:
    if not (run.root / "quarantine").is_dir():
        return ()
    return tuple(
        {"group": aside.seq, "attempt": aside.attempt, "kind": aside.kind, "file": aside.name, "reason": aside.reason}
        for aside in quarantined(run.root)
    )


def _slots(run: RunDir, processes: Processes) -> tuple[SlotView, ...]:
    from async_grpo_ipc.report import look_at_slots

    names = {view.pid: view.name for view in (processes.server, *processes.workers) if view is not None and view.alive}
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
