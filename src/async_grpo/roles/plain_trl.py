"""Plain TRL in one process with a run directory: `async-grpo train SETUP --device 0 --run-dir DIR`.

The trainer trains as TRL has it. `RUN_DIR/metrics.jsonl` gets what it logs, so that a sweep can follow and compare it.
SIGTERM ends it after its optimizer step, with a checkpoint, from which the same command continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from async_grpo.errors import AsyncGRPOError, BadFileError, DiskFullError, RunDirError, UsageError, reason_of
from async_grpo.rundir.files import write_json
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import describe_holder, server_lock
from async_grpo.rundir.paths import FINISHED, RUNNING, STOPPED, RunDir
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import shaped
from async_grpo.setup.process import StopRequest

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOTrainer

PROGRESS = "plain_trl.json"  # in the run directory


class PlainProgress(NamedTuple):
    """What `plain_trl.json` says."""

    state: str  # running, finished, stopped
    step: int
    total_steps: int
    saved: int  # step of its newest checkpoint, 0: there is none
    why: str = ""  # its newest process failed, in one line


def read_progress(run_dir: Path) -> PlainProgress | None:
    """How far the run is; None if it has not begun to train."""
    try:
        found = read_object(run_dir / PROGRESS)
        return shaped(PlainProgress, [found.get(name, "") for name in PlainProgress._fields], PROGRESS)
    except FileNotFoundError:
        return None
    except BadFileError as error:
        raise RunDirError(f"{error}. Choose another --run-dir.") from error


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """One process at a time trains in a run directory. Enter it before the trainer is built, which takes long.

    Raises:
        RunDirError: it holds a run that has finished, or a distributed one, or another process trains in it.
    """
    has_begun(run_dir)
    make_folder(run_dir)
    lock = server_lock(run_dir)
    if not lock.try_acquire({"role": "plain TRL"}):
        raise RunDirError(
            f"Another process trains in {run_dir} ({describe_holder(lock.holder())}). Wait for it, stop it, or choose "
            "another --run-dir."
        )
    with lock:
        yield


def train(trainer: GRPOTrainer, run_dir: Path) -> None:
    """Train to the end, or to a stop. A run that was begun in the run directory continues from its newest checkpoint.

    Raises:
        RunDirError: it holds a run that has finished, or a distributed one.
    """
    from async_grpo.setup.trl_compat import train_the_rest

    begun = read_progress(run_dir) if has_begun(run_dir) else None
    checkpoint = _newest_checkpoint(Path(trainer.args.output_dir), begun) if begun is not None else None
    stop = StopRequest().install()
    stop.defer()
    trainer.add_callback(_reporter(RunDir(run_dir), stop, saved=_step_of(checkpoint) if checkpoint is not None else 0))
    try:
        if not train_the_rest(trainer, checkpoint):
            trainer.callback_handler.on_train_end(trainer.args, trainer.state, trainer.control)
    except Exception as error:  # a stop is no failure
        with suppress(AsyncGRPOError, OSError):  # the first error is the one to be told
            _note_why(run_dir, reason_of(error))
        raise


def _note_why(run_dir: Path, why: str) -> None:
    if (progress := read_progress(run_dir)) is not None:
        write_json(run_dir / PROGRESS, progress._replace(why=why)._asdict())


def has_begun(run_dir: Path) -> bool:
    """Whether there is a run to continue. Raises `RunDirError` as `train` does."""
    if RunDir(run_dir).state_file.exists():
        raise RunDirError(f"{run_dir} holds a distributed run. Choose another --run-dir for training in one process.")
    progress = read_progress(run_dir)
    if progress is not None and progress.state == FINISHED:
        raise RunDirError(f"{run_dir} holds a run that has finished. Choose another --run-dir.")
    return progress is not None


def _newest_checkpoint(folder: Path, progress: PlainProgress) -> Path | None:
    """The run's newest one that is complete: the trainer's state is written last, and a kill may have cut it off.

    The folder may have later ones of another run. One of the run's own may be unnoted: a kill can come after it was
    written and before `plain_trl.json` says so.

    Raises:
        RunDirError: the one that was noted is gone, and so are those before it.
    """
    from transformers.trainer import TRAINER_STATE_NAME

    found: dict[int, Path] = {}
    for path in folder.glob("checkpoint-*"):
        with suppress(BadFileError, OSError, ValueError):
            if _step_of(path) <= progress.saved or _step_of(path) == progress.step:
                read_object(path / TRAINER_STATE_NAME)
                found[_step_of(path)] = path
    if not found and progress.saved:
        raise RunDirError(
            f"The run has done {progress.step} steps, but its checkpoint-{progress.saved} is not in {folder}. Move it "
            "back, or let output_dir of the setup file name its folder. To start over: another --run-dir."
        )
    return found[max(found)] if found else None


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def evaluate_every(trainer: Any, steps: int) -> None:
    """Have TRL evaluate before the first step and every so many steps; 0: never.

    Raises:
        UsageError: there is nothing to evaluate on.
    """
    from transformers.trainer_utils import IntervalStrategy

    require_problems(steps, has_dataset=trainer.eval_dataset is not None)
    trainer.args.eval_strategy = IntervalStrategy.STEPS if steps else IntervalStrategy.NO
    trainer.args.eval_steps, trainer.args.eval_on_start = steps or None, steps > 0


def require_problems(eval_every: int, *, has_dataset: bool) -> None:
    """Raise `UsageError` where evaluations were asked for and there is nothing to evaluate on."""
    if eval_every and not has_dataset:
        raise UsageError(
            f"--eval-every {eval_every}: the setup file's trainer has no eval_dataset, so there is nothing to evaluate "
            "on. Give the GRPOTrainer one, or leave the option out."
        )


def _reporter(run: RunDir, stop: StopRequest, *, saved: int) -> TrainerCallback:
    """What writes a run's files. `saved`: step of the checkpoint that it continues from; 0: none."""
    from transformers import TrainerCallback

    from async_grpo.setup.trl_compat import AllStepsDone
    from async_grpo.telemetry.run_log import RunLog

    log = RunLog(run.metrics)

    class Reporter(TrainerCallback):
        """Writes what a sweep reads."""

        def __init__(self) -> None:
            self._saved = saved

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step >= state.max_steps:  # it was killed before it could say that it has finished
                raise AllStepsDone
            log.training_begins(state.max_steps, state.global_step)
            self._say(state, RUNNING)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            log.logged(state.global_step, logs or {})

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._say(state, RUNNING)
            if stop.requested:
                control.should_save = control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._saved = state.global_step
            self._say(state, RUNNING)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._say(state, FINISHED if state.global_step >= state.max_steps else STOPPED)
            log.close()

        def _say(self, state: Any, text: str) -> None:
            progress = PlainProgress(text, state.global_step, state.max_steps, self._saved)
            with suppress(DiskFullError) if text == RUNNING else nullcontext():  # the next step may find space
                write_json(run.root / PROGRESS, progress._asdict())

    return Reporter()
