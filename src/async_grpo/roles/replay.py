"""Trains again from a run's archived groups, without any worker: the way to compare losses on identical data."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from async_grpo.archive.audit import audit
from async_grpo.archive.checkpoint_folders import Checkpoint, of_run
from async_grpo.archive.groups import done_files, open_run
from async_grpo.archive.history import Sampler, ServerProcess, Used, final_history, read_record
from async_grpo.errors import AsyncGRPOError, RunDirError, UnsupportedError, UsageError
from async_grpo.formatting import counted
from async_grpo.log import logger
from async_grpo.queue.codec import MAX_FILE_BYTES, decode_group
from async_grpo.queue.filesystem import OsFiles
from async_grpo.queue.names import COMPLETE, parse_name
from async_grpo.records import RolloutGroup
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.reading import naming, read_file
from async_grpo.settings import TrainingSettings
from async_grpo.setup.generated.trl_command import setup_file_of_run
from async_grpo.setup.process import gc_paused, make_deterministic
from async_grpo.setup.sampling import WITHOUT_SAMPLER
from async_grpo.setup.setup_file import load_trainer
from async_grpo.telemetry.run_log import REPLAY_LINE, RunLog, described
from async_grpo.training.corrections.rule import Rule, rule_of

DEFAULT = Path("outputs/replay-N")  # N: the first number that no folder has
_CHECKPOINT = re.compile(r"checkpoint-\d+.*")
CHUNK_BYTES = 1 << 20  # a file of weights may be larger than the memory


class ReplayStoppedError(AsyncGRPOError):
    """Ctrl-C: what became of the replay."""

    exit_code = 130  # what a shell shows for a program that SIGINT ended


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    run_dir: Path
    output_dir: Path | None = None  # a new folder for the weights; None: `outputs/replay-N`
    correction: str | None = None  # None: the run's, with its options
    correction_level: str | None = None  # None: those of the correction
    correction_min: float | None = None
    correction_max: float | None = None
    loss_type: str | None = None  # None: the setup file's
    steps: int | None = None  # None: as many as the run did


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    output_dir: Path  # that has the weights
    steps: int
    last_step: list[str]  # the figures of its step line
    digest: str  # SHA-256 over the saved weight files
    same_as: Path | None  # the run's own checkpoint of the same step, where its weights are equal bit for bit
    sampled_by: tuple[int, ...]  # the policy versions that the groups are of
    compared: Path | None  # that checkpoint, equal or not; None where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayRecord:
    """What the run directory says about the training that is to be repeated."""

    run: RunDir
    state: RunState
    processes: list[ServerProcess]
    used_by: list[tuple[int, Used]]  # with the index of the process
    files: dict[int, Path]  # of each group
    steps: int  # that the run has done


def run_replay(options: ReplayOptions) -> Replayed:
    """Train on the groups of the run, in the order in which it used them.

    Raises:
        RunDirError: the directory holds no run, its audit has anomalies, or groups are no longer in its archive.
        UsageError: more steps were asked for than the run has, or the folder for the weights is in use.
        UnsupportedError: the groups do not have what the correction needs.
    """
    record = _recorded(options.run_dir)
    _require_clean(record.run)
    if options.steps is not None and options.steps > record.steps:
        raise UsageError(f"--steps {options.steps}: the run has only {record.steps} steps to replay.")
    with made(options.output_dir) as output_dir:
        return _replay(options, record, output_dir)


def _recorded(run_dir: Path) -> _ReplayRecord:
    run, state = open_run(run_dir)
    if not run.consumption.exists():
        raise RunDirError(f"The run in {run.root} has not trained yet, so there is nothing to replay.")
    processes, broken = read_record(run.consumption, state.run_id)
    if broken:
        raise RunDirError(f"{run.root} cannot be replayed. {broken[0]}")
    used_by = final_history(processes)
    if not used_by:
        raise RunDirError(f"{run.root} has not finished a training step, so there is nothing to replay.")
    files = archived_files(run, [seq for _, (_, batch) in used_by for seq in batch.seqs])
    done = max(state.step, *(step for _, (step, _) in used_by))  # a batch may serve several steps
    return _ReplayRecord(run=run, state=state, processes=processes, used_by=used_by, files=files, steps=done)


def _require_clean(run: RunDir) -> None:
    """A group that was changed, used twice or is missing would be trained on without a word."""
    if anomalies := audit(run.root).anomalies:
        more = f" (and {len(anomalies) - 1} more)" if len(anomalies) > 1 else ""
        raise RunDirError(
            f"{run.root} cannot be replayed, since its audit is not clean: {anomalies[0]}{more} `async-grpo audit` "
            "lists all."
        )


def _replay(options: ReplayOptions, record: _ReplayRecord, output_dir: Path) -> Replayed:
    state, training = record.state, record.state.plan.training
    make_deterministic()
    with gc_paused():
        trainer = load_trainer(
            setup_file_of_run(state),
            engine_here=False,
            steps=options.steps or record.steps,
            seed=training.seed,
            config_values=training.set,
        )
    trainer.args.output_dir = str(output_dir)
    trainer.args.save_strategy, trainer.args.push_to_hub = "no", False
    if options.loss_type is not None:
        trainer.args.loss_type = trainer.loss_type = options.loss_type
    correction = _rule(options, training)
    _check_groups_suit(correction, _sampled(record.processes, trainer, state)[: record.used_by[-1][0] + 1])
    steps = counted(options.steps or record.steps, "step")
    logger.info("replaying {} of run {} with {} / {}", steps, state.run_id, trainer.args.loss_type, correction)
    sampled_by: set[int] = set()
    groups = _groups_of([used for _, used in record.used_by], record.files, state.run_id, sampled_by)
    _train(trainer, groups, correction, training, output_dir)
    return _outcome(trainer, output_dir, of_run(Path(state.output_dir), state.run_id), sampled_by)


def _rule(options: ReplayOptions, run: TrainingSettings) -> Rule:
    """What the command line asks for; what it leaves open as in the run, unless it names another correction."""
    names = ("correction", "correction_level", "correction_min", "correction_max")
    asked = {name: value for name in names if (value := getattr(options, name)) is not None}
    others: dict[str, Any] = dict.fromkeys(names) if "correction" in asked else {}
    return rule_of(replace(run, **{**others, **asked}))


def _sampled(processes: Sequence[ServerProcess], trainer: Any, state: RunState) -> list[Sampler]:
    """How each process had its groups sampled. A resume may change that, and run.json says it of the last one only."""
    from async_grpo.training.corrections.checks import sampled_with

    generator = state.generator or state.plan.work.generator
    of_run = sampled_with(trainer, state.plan.training.correction, generator)
    return [process.sampled or of_run for process in processes]


def _check_groups_suit(correction: Rule, sampled: Sequence[Sampler]) -> None:
    """Refuse groups of vLLM whose log-probabilities are of another distribution than the loss computes.

    A process whose own correction needs the sampler is refused such sampling, or its groups name the tokens that were
    kept.
    """
    if correction.name in WITHOUT_SAMPLER:
        return
    departing = [how for how in sampled if how.departures]
    for how in departing:
        if how.generator is not None:
            part = "" if len(departing) == len(sampled) else " for a part of it (a resume changed that)"
            raise UnsupportedError(
                f"The run was trained by --correction {how.correction} with {', '.join(how.departures)}{part}, so "
                "groups of it have vLLM's log-probabilities of another distribution than the loss computes, and do not "
                f"name the tokens that were kept: --correction {correction.name} would be biased. Replay it with "
                "--correction none or trl."
            )
    if departing:
        logger.warning(
            "the run does not say what sampled its groups: the workers were started by hand. If it was "
            "vLLM, its log-probabilities are of another distribution than the loss computes ({}), "
            "and --correction {} is biased: replay with --correction none or trl then",
            ", ".join(departing[0].departures),
            correction.name,
        )


def archived_files(run: RunDir, seqs: Iterable[int]) -> dict[int, Path]:
    """The file in `done/` of each finished group. Raises `RunDirError` when one of `seqs` is missing."""
    with closing(OsFiles(run.root)) as folder:
        files = {name.seq: run.root / path for path, name in done_files(folder) if name.state == COMPLETE}
    missing = [seq for seq in seqs if seq not in files]
    if missing:
        raise RunDirError(
            f"{len(missing)} groups of the run are no longer in {run.root / 'done'} (the first is {missing[0]}). "
            "A run that is to be replayed needs a larger --keep-done."
        )
    return files


def _groups_of(
    history: Iterable[Used], files: Mapping[int, Path], run_id: str, sampled_by: set[int]
) -> Iterator[list[RolloutGroup]]:
    """The batches of the run, in the order in which it used them; their policy versions go into `sampled_by`."""
    for _, batch in history:
        groups = [_group(files[seq], run_id) for seq in batch.seqs]
        sampled_by.update(group.policy_version for group in groups)
        yield groups


def _group(file: Path, run_id: str) -> RolloutGroup:
    data = read_file(file, MAX_FILE_BYTES)
    with naming(file):
        return decode_group(data, parse_name(file.name), run_id)


def _train(
    trainer: Any, batches: Iterator[list[RolloutGroup]], correction: Rule, run: TrainingSettings, output_dir: Path
) -> None:
    """Train `trainer` on `batches`; its weights, curves and metrics are in `output_dir` afterwards."""
    from async_grpo.training import trl_trainer
    from async_grpo.training.corrections.checks import check
    from async_grpo.training.corrections.trl_loss import has_own_loss
    from async_grpo.training.reporting import report

    class Replay(trl_trainer.TrainingEvents):
        def take_groups(self, version: int) -> list[RolloutGroup]:
            return next(batches)

    check(correction, trainer, own_loss=has_own_loss(trainer))
    trl_trainer.make_async(trainer, Replay(), correction=correction, settings=run)
    try:
        with closing(RunLog(output_dir / "metrics.jsonl", REPLAY_LINE)) as log:
            report(trainer, log, output_dir / "tensorboard")
            trl_trainer.fit(trainer, resume_from=None)
        trainer.save_model(str(output_dir))
    except KeyboardInterrupt as error:
        raise ReplayStoppedError(
            _what_became(trainer.state.global_step, trainer.state.max_steps, output_dir)
        ) from error


def _what_became(done: int, steps: int, output_dir: Path) -> str:
    if done == steps:
        return f"The replay was stopped while it saved its weights: those in {output_dir} may not be complete."
    return (
        f"The replay was stopped after {done} of {steps} steps and saved no weights. {output_dir} has the metrics and "
        "curves of these steps, and the run that was replayed is as it was. A replay cannot be continued, only started "
        "again; --steps N replays the first N steps."
    )


def _outcome(trainer: Any, saved: Path, checkpoints: Iterable[Checkpoint], sampled_by: Iterable[int]) -> Replayed:
    step = int(trainer.state.global_step)
    last: dict[str, Any] = next((entry for entry in reversed(trainer.state.log_history) if "loss" in entry), {})
    compared = next((checkpoint.path for checkpoint in checkpoints if checkpoint.state.step == step), None)
    digest = checkpoint_digest(saved)
    return Replayed(
        output_dir=saved,
        steps=step,
        last_step=described(last, REPLAY_LINE),
        digest=digest,
        same_as=compared if compared is not None and checkpoint_digest(compared) == digest else None,
        sampled_by=tuple(sorted(sampled_by)),
        compared=compared,
    )


def checkpoint_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of the files of weights in `folder`, hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(set(folder.glob("*.safetensors")) - set(folder.glob("rollout_batch*"))):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def made(named: Path | None) -> Iterator[Path]:
    """Make the folder that the command line named, or the next `outputs/replay-N`: nothing that is there is replaced.

    It is removed again if nothing was written into it.

    Raises:
        UsageError: it is in use, or has the name of a checkpoint.
    """
    folder = _next_folder() if named is None else _own_folder(named)
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()  # refuses a folder that has something in it


def _own_folder(folder: Path) -> Path:
    if (problem := _problem_of(folder)) is not None:
        raise UsageError(
            f"--output-dir {folder}: {problem} Name a folder that does not exist yet, or leave the option out: the "
            f"weights go to {DEFAULT} then."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _problem_of(folder: Path) -> str | None:
    if folder.is_dir() and any(folder.iterdir()):
        return "it has files in it, and a replay replaces nothing."
    if (folder.is_symlink() or folder.exists()) and not folder.is_dir():
        return "it is no folder."
    here = folder.resolve()
    if _CHECKPOINT.fullmatch(here.name):
        return "that is the name of a checkpoint of a run, and a replay is none."
    for above in here.parents:
        if RunDir(above).state_file.exists() or _CHECKPOINT.fullmatch(above.name):
            return f"it is in {above}, which is a run's."
    return None


def _next_folder() -> Path:
    for number in count(1):
        folder = DEFAULT.with_name(DEFAULT.name.replace("N", str(number)))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("count() has no end")
