"""Which run an `output_dir` belongs to, and where the checkpoints of a resumed run are looked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.checkpoint_folders import Checkpoint
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.formatting import counted
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import is_over
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.shape import shaped

MARKER = "_async_grpo.json"


class Owner(NamedTuple):
    """A run that has written, or is to write, checkpoints into a folder."""

    run_id: str
    run_dir: str


def absolute(setting: str, state: RunState | None, run_dir: Path) -> Path:
    """The `output_dir` that a setup file names.

    A resumed run that is started in another folder means the one that it was begun in, unless its directory was moved
    or copied: then its new surroundings count.
    """
    here = Path.cwd()
    if state is None or was_moved(state, run_dir):
        return here / setting
    there = Path(state.started_in)
    return (there if there.is_dir() else here) / setting


def find_checkpoint(setting: str, state: RunState, run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint of the run, wherever the run or the setup file says; None if it has none yet.

    Raises:
        RunDirError: the run has trained, and none of its checkpoints is there; or the newest is not as it was written.
    """
    named = [Path(state.output_dir)] if state.output_dir else []
    folders = list(dict.fromkeys([*named, absolute(setting, state, run_dir), Path(setting).absolute()]))
    if was_moved(state, run_dir):  # perhaps copied, and the other one goes on in the folder that the run names
        folders.reverse()
        folders = [folder for folder in folders if checkpoint_folders.of_run(folder, state.run_id)][:1] or folders
    found = checkpoint_folders.latest(folders, state.run_id)
    if found is None and state.step > 0:
        raise RunDirError(_not_found(state, folders))
    return found


def newest_checkpoint(run_dir: Path) -> Path:
    """The newest complete checkpoint of the run in `run_dir`, for a reader.

    Raises:
        RunDirError: it has none, or its newest is not as it was written.
    """
    state = RunDir(run_dir).read_state()
    if state is None:
        raise RunDirError(f"{run_dir} holds no run.")
    found = find_checkpoint(state.output_dir, state, run_dir)
    if found is None:
        raise RunDirError(
            f"Run {state.run_id} in {run_dir} has no checkpoint yet. save_strategy and save_steps of its setup "
            "file say when one is saved; stopping the run saves one too."
        )
    return found.path


def was_moved(state: RunState, run_dir: Path) -> bool:
    """Whether the run directory is not where a server last found it: it was moved, or copied."""
    return Path(state.run_dir) != run_dir.resolve()


def _not_found(state: RunState, folders: Sequence[Path]) -> str:
    searched = "\n".join(f"  {folder}" for folder in folders)
    return (
        f"Run {state.run_id} has done {counted(state.step, 'step')}, but it has no checkpoint in\n{searched}\n"
        "If its checkpoints were moved, move them back, or let output_dir of the setup file name their folder. If it "
        "never wrote one, nothing can be resumed: --overwrite deletes the run's queue, logs and metrics and starts "
        "again from step 0."
    )


def refuse_another_runs(output_dir: Path, run_id: str, run_dir: Path) -> None:
    """Raise `RunDirError` where another run that is not over has its checkpoints in `output_dir`.

    A run of `run_dir` itself is no obstacle: `run_dir` is to be this run's.
    """
    for owner in _owners(output_dir):
        state = _unfinished(owner)
        if state is None or Path(owner.run_dir) == run_dir.resolve():
            continue
        if owner.run_id == run_id:  # a copy of this one; the checkpoints of both have the same names and the same id
            stands_in_the_way = Path(state.output_dir).resolve() == output_dir.resolve() and _is_live(owner)
        else:
            stands_in_the_way = bool(checkpoint_folders.of_run(output_dir, owner.run_id)) or _is_live(owner)
        if stands_in_the_way:
            raise RunDirError(
                f"{output_dir} holds the checkpoints of another unfinished run ({owner.run_id}, {state.state}, step "
                f"{state.step}, in {owner.run_dir}). Two runs in one output_dir would replace each other's "
                "checkpoints. Give this run another output_dir in its setup file, or finish that one first: "
                f"--resume --run-dir {owner.run_dir}. If that run is not needed, delete its run directory."
            )


def what_stays(output_dir: Path, run_id: str) -> str:
    """A sentence about the checkpoints in `output_dir` that are not this run's; empty if there are none."""
    others = [found for found in checkpoint_folders.complete(output_dir) if found.state.run_id != run_id]
    number = len(others) + len(checkpoint_folders.without_owner(output_dir))
    if not number:
        return ""
    stay = "It stays" if number == 1 else "They stay"
    return (
        f"{output_dir} has {counted(number, 'checkpoint')} that this run did not write. {stay}: one whose name this "
        "run needs becomes checkpoint-N-of-RUN. An output_dir for each run keeps them apart."
    )


def claim(output_dir: Path, run_id: str, run_dir: Path) -> None:
    """Say in `output_dir` that this run writes here. `RunDirError`: it cannot."""
    output_dir.mkdir(parents=True, exist_ok=True)
    checkpoint_folders.check_renames(output_dir, run_id)
    write_json(output_dir / MARKER, Owner(run_id, str(run_dir.resolve()))._asdict())


def _owners(output_dir: Path) -> Iterator[Owner]:
    """Every run that the marker or a checkpoint names, wherever its directory was then."""
    found = [Owner(found.state.run_id, found.state.run_dir) for found in checkpoint_folders.complete(output_dir)]
    yield from (owner for owner in dict.fromkeys([*_marked(output_dir), *found]) if owner.run_dir)


def _is_live(owner: Owner) -> bool:
    return server_alive(Path(owner.run_dir))


def _marked(output_dir: Path) -> list[Owner]:
    try:
        return [Owner(**shaped(dict[str, str], read_object(output_dir / MARKER)))]
    except (OSError, BadFileError, TypeError):
        return []


def _unfinished(owner: Owner) -> RunState | None:
    """The state of the run, if its directory still holds it and it is not over."""
    try:
        state = RunDir(Path(owner.run_dir)).read_state()
    except (RunDirError, OSError):
        return None
    return state if state is not None and state.run_id == owner.run_id and not is_over(state) else None
