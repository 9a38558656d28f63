"""How far a run of a sweep is, and what it has found, from the files of its run directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import psutil

from async_grpo.errors import BadFileError, RunDirError
from async_grpo.evals import eval_ledger
from async_grpo.formatting import eta
from async_grpo.roles.plain_trl import PROGRESS, PlainProgress, read_progress
from async_grpo.rundir.paths import FINISHED, RunDir, RunState
from async_grpo.rundir.shape import is_number
from async_grpo.status.snapshot import look
from async_grpo.telemetry import entries
from async_grpo.telemetry.run_log import TAIL_BYTES
from async_grpo_experiments.slots.gpu_usage import mean_percent
from async_grpo_experiments.slots.ledger import RUNNING, WAITING, Record
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.sweeps.plan import ASYNC, Run, Sweep

COLUMNS = ("seed", "place", "state", "step", "reward", "evaluated reward", "rollouts/s", "use", "ETA")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    state: str
    step: int = 0
    total_steps: int | None = None
    reward: float | None = None  # of the last step
    evaluation: float | None = None  # the mean reward of the newest
    rollouts_per_second: float | None = None
    eta_s: float | None = None
    pids: tuple[int, ...] = ()  # of the processes that compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    reward: Mapping[int, float] = field(default_factory=dict)  # of training, by step
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)  # figures, by step
    by_problem: Mapping[int, Mapping[str, Sequence[float]]] = field(default_factory=dict)  # step -> problem -> values
    sampling: str = ""  # how the evaluations' completions were sampled, in words
    headline: str = "reward_mean"  # the figure of the evaluations to show first


def progress_of(run: Run) -> Progress:
    """How far it is. A run that cannot be read is `loading`: it may be making its files just now."""
    try:
        found = _distributed(run) if run.sweep.mode == ASYNC else _plain(run)
        recent = entries.read(RunDir(run.run_dir).metrics, at_most=TAIL_BYTES)
    except (RunDirError, BadFileError, OSError):
        return Progress(state="loading")
    newest = {name: value for entry in recent for name, value in entry.items() if is_number(value)}
    evaluation = newest.get("eval_reward_mean", newest.get("eval_reward"))  # ours, or TRL's own
    return replace(found, reward=newest.get("reward"), evaluation=evaluation)


def _distributed(run: Run) -> Progress:
    view = look(run.run_dir, details=False)
    return Progress(
        state=view.state,
        step=view.step,
        total_steps=view.total_steps,
        rollouts_per_second=view.rates.rollouts_per_second if view.rates else None,
        eta_s=view.eta_s,
        pids=tuple(one.pid for one in (view.server, *view.workers) if one is not None and one.alive),
    )


def _plain(run: Run) -> Progress:
    found = read_progress(run.run_dir)
    if found is None:
        return Progress(state="loading")
    return Progress(state=found.state, step=found.step, total_steps=found.total_steps)


class RunRows:
    def __init__(self, sweep: Sweep, records: Mapping[str, Record], places: Sequence[Place]) -> None:
        self._runs, self._records = sweep.runs, records
        self._gpus = {place.name: place.gpus for place in places}
        self._processes: dict[int, psutil.Process] = {}

    def __call__(self) -> Iterator[tuple[str, ...]]:
        for run in self._runs:
            record = self._records.get(run.name, Record(task=run.name, state=WAITING))
            shown = ("", WAITING) if record.state == WAITING else self._cells(progress_of(run), record)
            yield (str(run.seed), *shown, *[""] * (len(COLUMNS) - 1 - len(shown)))

    def in_words(self) -> str:
        """`seed 42: training, step 40/100, reward 0.931, ETA 12 s | seed 1337: waiting`."""
        return " | ".join(map(_in_words, self()))

    def _cells(self, found: Progress, record: Record) -> tuple[str, ...]:
        """All but the seed."""
        running = record.state == RUNNING
        return (
            record.place,
            found.state if running else record.state,
            f"{found.step}/{found.total_steps}" if found.total_steps else str(found.step),
            _shown(found.reward, ".3f"),
            _shown(found.evaluation, ".3f"),
            _shown(found.rollouts_per_second, ".0f") if running else "",
            self.use((record.pid, *found.pids), self._gpus.get(record.place, ())) if running else "",
            eta(found.eta_s) if running and found.eta_s is not None else "",
        )

    def use(self, pids: Sequence[int], gpus: Sequence[str]) -> str:
        """`GPU 87%`, or `1.8 cores` of a run without GPUs; empty at the first look."""
        if gpus:
            return "" if (mean := mean_percent(gpus)) is None else f"GPU {mean:.0f}%"
        percent = 0.0
        for pid in pids:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if pid not in self._processes:
                    self._processes[pid] = psutil.Process(pid)
                percent += self._processes[pid].cpu_percent()  # since the look before
        return f"{percent / 100:.1f} cores" if percent else ""


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _in_words(row: Sequence[str]) -> str:
    seed, _, state, *others = row
    parts = [f"{name} {cell}" for name, cell in zip(COLUMNS[3:], others, strict=True) if cell]
    return f"seed {seed}: {', '.join([state, *parts])}"


def unfinished(run: Run) -> str:
    """Why a run is not done although its process ended well; empty if it is done."""
    try:
        found = _written(run)
    except (RunDirError, OSError) as error:
        return str(error)
    if found is not None and found.state == FINISHED:
        return ""
    return f"its process ended at step {found.step if found is not None else 0}, before the run was finished"


class Reason:
    """Why a run failed, as it has written itself since `begins`; empty where it has written nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._file = RunDir(run.run_dir).state_file if run.sweep.mode == ASYNC else run.run_dir / PROGRESS
        self._before: object = None

    def begins(self) -> None:
        self._before = self._written()

    def __call__(self) -> str:
        if self._written() == self._before:
            return ""
        with suppress(RunDirError, OSError):
            found = _written(self._run)
            return found.why if found is not None else ""
        return ""

    def _written(self) -> object:
        with suppress(OSError):
            found = self._file.stat()
            return found.st_ino, found.st_mtime_ns
        return None


def _written(run: Run) -> RunState | PlainProgress | None:
    """What the run has written of itself; None where it has not begun."""
    return RunDir(run.run_dir).read_state() if run.sweep.mode == ASYNC else read_progress(run.run_dir)


def steps_left(run: Run) -> int | None:
    """Steps that are left of a run that was begun. None: unknown."""
    found = progress_of(run)
    return None if found.total_steps is None else found.total_steps - found.step


def curves(run: Run) -> Curves:
    """Everything that the run has logged. After a resume, the last value of a step counts.

    Raises:
        BadFileError: a file of the run cannot be read.
    """
    rewards: dict[int, float] = {}
    evaluations: dict[int, dict[str, float]] = {}
    sampling = ""
    for entry in entries.read(RunDir(run.run_dir).metrics):
        step = entry["step"]
        if "loss" in entry:
            if is_number(entry.get("reward")):
                rewards[step] = entry["reward"]
        elif is_number(entry.get("eval_reward")):  # TRL's own
            sampling = "as in training"
            figure = f"{entry[entries.SET]}/reward_mean" if entries.SET in entry else "reward_mean"
            evaluations.setdefault(step, {})[figure] = entry["eval_reward"]
    by_problem: dict[int, Mapping[str, Sequence[float]]] = {}
    of_workers = eval_ledger.read(RunDir(run.run_dir).evaluations)
    for one in of_workers:
        evaluations[one.step] = {name: figure.value for name, figure in one.figures.items()}
        by_problem[one.step] = one.by_problem
        sampling = f"with {eval_ledger.sampling_in_words(one.sampling)}"
    first = {one.headline for one in of_workers if one.figures}
    return Curves(
        reward=rewards,
        evaluations=evaluations,
        by_problem=by_problem,
        sampling=sampling,
        headline=first.pop() if len(first) == 1 else "reward_mean",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRuns:
    """What the finished runs of a sweep have measured. All others are named."""

    name: str  # of the sweep
    runs: Mapping[int, Curves]  # by seed
    not_counted: Mapping[str, str]  # seed -> why
    dataset: str | None = None  # --dataset of the sweep


def finished_runs(sweep: Sweep, records: Mapping[str, Record], name: str = "") -> FinishedRuns:
    found: dict[int, Curves] = {}
    missing: dict[str, str] = {}
    for run in sweep.runs:
        record = records.get(run.name)
        if record is None or record.state != FINISHED:
            missing[str(run.seed)] = _why(record)
            continue
        try:
            found[run.seed] = curves(run)
        except BadFileError as error:
            missing[str(run.seed)] = str(error)
    return FinishedRuns(name=name or sweep.folder.name, runs=found, not_counted=missing, dataset=sweep.dataset)


def _why(record: Record | None) -> str:
    if record is None:
        return "never started"
    return f"{record.state}: {record.why}" if record.why else record.state
