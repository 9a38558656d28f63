"""The folder of checkpoints, `output_dir`: whose each of them is, which is the newest, and how a new one gets there.

    OUTPUT_DIR/
        checkpoint-N/                  complete: it gets this name when everything in it is on disk
        _saving-RUN/checkpoint-N/      run RUN is writing it, or was killed while it did
        checkpoint-N-of-RUN/           was checkpoint-N of run RUN until another run wrote its own
        _async_grpo.json               the run that writes here

A checkpoint is a run's if its `rollout_state.json` says so. Nothing else in the folder is ever changed or deleted.
`push_to_hub` uploads the folder without what begins with an underscore, and without checkpoints.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from async_grpo.archive import rollout_state
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.log import logger
from async_grpo.rundir.files import free_name, sync

_NAME = re.compile(r"checkpoint-\d+(-of-\w+(-\d+)?)?")
_BOUND = {".safetensors", ".bin", ".pt", ".pth", ".distcp"}  # files that a resume reads, besides the trainer's state
_TRAINER_STATE = "trainer_state.json"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2(2)
_READ_WHOLE = 64 << 20  # bytes; of a larger file, pieces that are spread over it
_PIECES, _PIECE = 64, 1 << 20


class Checkpoint(NamedTuple):
    """A complete checkpoint."""

    path: Path
    state: RolloutState


def staging(output_dir: Path, run_id: str) -> Path:
    """Where run `run_id` writes a checkpoint before it is complete."""
    return output_dir / f"_saving-{run_id}"


def start_saving(folder: Path) -> None:
    """Make `folder` ready for a checkpoint: what a killed process left there is removed first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def check_renames(output_dir: Path, run_id: str) -> None:
    """Raise `RunDirError` where folders cannot be renamed: a checkpoint gets its name like that."""
    folder = staging(output_dir, run_id)
    start_saving(folder / "probe")
    try:
        (folder / "probe").rename(folder / "renamed")
    except OSError as error:
        raise RunDirError(
            f"No folder can be renamed in {output_dir} ({error.strerror}). A checkpoint is written under another name "
            "and renamed when it is complete, so that no half one is taken for it. Set output_dir to a folder on "
            "another file system, and copy the checkpoints from there."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def save(checkpoint: Path, state: RolloutState) -> None:
    """Complete `checkpoint`: everything in it is on disk before the file that says so appears."""
    for path in (path for path in checkpoint.rglob("*") if path.is_file()):
        sync(path)
    rollout_state.write(checkpoint, replace(state, files=_digests(checkpoint)))
    sync(checkpoint / rollout_state.FILE_NAME)
    sync(checkpoint)


def put_in_place(written: Path, output_dir: Path, run_id: str) -> Path:
    """Give a complete checkpoint its name in `output_dir`; returns where it is now.

    A checkpoint that has this name is replaced if it is this run's, which has gone back to an older one since. Any
    other is renamed.
    """
    target = output_dir / written.name
    older = None if target.is_symlink() else _state_of(target)
    if older is not None and older.run_id == run_id:
        _replace(target, written, older)
    else:
        if os.path.lexists(target):
            aside = free_name(target.with_name(f"{target.name}-of-{_run_of(target) or 'before'}"))
            logger.warning("{} is not this run's checkpoint: it is now {}", target, aside)
            target.rename(aside)
        written.rename(target)
    sync(output_dir)
    shutil.rmtree(written.parent, ignore_errors=True)
    return target


def latest(folders: Sequence[Path], run_id: str) -> Checkpoint | None:
    """The newest checkpoint that run `run_id` wrote into one of `folders`, or None.

    Raises:
        RunDirError: it is not as it was written, or what may be a newer one cannot be read.
    """
    found = [checkpoint for folder in folders for checkpoint in of_run(folder, run_id)]
    newest = max(found, key=lambda checkpoint: checkpoint.state.step, default=None)
    for folder in folders:
        _refuse_unreadable(folder, run_id, newer_than=newest.state.step if newest else -1)
    if newest is not None:
        _check_whole(newest)
    return newest


def _refuse_unreadable(output_dir: Path, run_id: str, newer_than: int) -> None:
    for folder in _folders(output_dir):
        try:
            rollout_state.read(path := folder / rollout_state.FILE_NAME)
        except FileNotFoundError:
            continue
        except BadFileError as error:
            step = int(folder.name.split("-")[1])
            if step > newer_than and not rollout_state.names_another(path, run_id):
                raise RunDirError(f"{error}. Move {folder} away to resume from an older checkpoint.") from error


def of_run(output_dir: Path, run_id: str) -> list[Checkpoint]:
    """The run's checkpoints, oldest first."""
    found = [checkpoint for checkpoint in complete(output_dir) if checkpoint.state.run_id == run_id]
    return sorted(found, key=lambda checkpoint: checkpoint.state.step)


def of_step(beside: Path, step: int) -> Path | None:
    """The checkpoint of optimizer step `step` in the folder of checkpoint `beside`, of the same run."""
    run_id = _run_of(beside)
    mine = of_run(beside.parent, run_id) if run_id is not None else []
    return next((checkpoint.path for checkpoint in mine if checkpoint.state.step == step), None)


def complete(output_dir: Path) -> Iterator[Checkpoint]:
    """Every complete checkpoint in `output_dir` that can be read, whichever run's."""
    for folder in _folders(output_dir):
        if (state := _state_of(folder)) is not None:
            yield Checkpoint(folder, state)


def without_owner(output_dir: Path) -> list[Path]:
    """Checkpoints that no run of ours completed, such as plain TRL's, or whose state cannot be read."""
    return [folder for folder in _folders(output_dir) if _state_of(folder) is None]


def rotate(output_dir: Path, run_id: str, limit: int | None, best: str | None) -> None:
    """Delete the run's oldest checkpoints beyond `limit`, never its newest nor the `best`.

    What the run did not write, and what has another name, stays.
    """
    if limit is None or limit <= 0:
        return
    mine = _named_by(output_dir, run_id)
    protected = {*mine[-1:], *(path for path in mine if _is(path, best))}
    surplus = len(mine) - max(limit, len(protected))
    for checkpoint in [path for path in mine if path not in protected][: max(0, surplus)]:
        delete(checkpoint, run_id)


def keep_only(output_dir: Path, run_id: str, best: str) -> None:
    """Delete the run's checkpoints but the `best`."""
    for checkpoint in _named_by(output_dir, run_id):
        if not _is(checkpoint, best):
            delete(checkpoint, run_id)


def delete(checkpoint: Path, run_id: str) -> None:
    """Delete a checkpoint of the run. It loses its name first: what a kill leaves goes with the next one."""
    aside = staging(checkpoint.parent, run_id)
    shutil.rmtree(aside, ignore_errors=True)
    try:
        checkpoint.rename(aside)
    except OSError:  # something is left there that cannot be deleted
        (checkpoint / rollout_state.FILE_NAME).unlink(missing_ok=True)
        aside = checkpoint
    shutil.rmtree(aside, ignore_errors=True)


def _folders(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return [path for path in sorted(output_dir.iterdir()) if _NAME.fullmatch(path.name) and path.is_dir()]


def _named_by(output_dir: Path, run_id: str) -> list[Path]:
    """Checkpoints that run `run_id` wrote and that have the names which it gave them, oldest first.

    A copy under another name is the user's, and what cannot be read is not this run's to judge.
    """
    found: list[tuple[int, Path]] = []
    for folder in _folders(output_dir):
        state = None if folder.is_symlink() else _state_of(folder)
        if state is not None and state.run_id == run_id:
            name = rf"checkpoint-{state.step}(-of-{re.escape(run_id)}(-\d+)?)?"
            found += [(state.step, folder)] if re.fullmatch(name, folder.name) else []
    return [folder for _, folder in sorted(found)]


def _is(checkpoint: Path, named: str | None) -> bool:
    return named is not None and checkpoint.resolve() == Path(named).resolve()


def _replace(target: Path, written: Path, older: RolloutState) -> None:
    """Put `written` where the run has an older checkpoint. Files that a user added to that one stay."""
    aside = written
    if not _exchange(written, target):
        aside = written.with_name(f"{written.name}.old")
        target.rename(aside)
        written.rename(target)
    ours = {rollout_state.FILE_NAME, *(Path(name).parts[0] for name in older.files)}
    for path in aside.iterdir():
        if path.name in ours or (not older.files and path.suffix in _BOUND) or os.path.lexists(target / path.name):
            continue
        path.rename(target / path.name)


def _exchange(written: Path, target: Path) -> bool:
    """Swap the two at once; False where the file system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = os.fsencode(written), os.fsencode(target)
    return rename is not None and rename(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0


def _run_of(checkpoint: Path) -> str | None:
    state = _state_of(checkpoint)
    return state.run_id if state is not None else None


def _state_of(checkpoint: Path) -> RolloutState | None:
    try:
        return rollout_state.read(checkpoint / rollout_state.FILE_NAME)
    except (OSError, BadFileError):
        return None


def _check_whole(checkpoint: Checkpoint) -> None:
    """Raise `RunDirError` unless the files are those that were there when the checkpoint was completed."""
    for name, digest in checkpoint.state.files.items():
        path = checkpoint.path / name
        what = "is missing" if not path.is_file() else "has other contents" if _digest(path) != digest else ""
        if what:
            raise RunDirError(
                f"{checkpoint.path} is not as run {checkpoint.state.run_id} wrote it: {name} {what}. Training would "
                f"continue from other weights. Move {checkpoint.path} away to resume from an older checkpoint."
            )


def _digests(checkpoint: Path) -> dict[str, str]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    bound = [path for path in files if path.suffix in _BOUND or path.name == _TRAINER_STATE]
    return {str(path.relative_to(checkpoint)): _digest(path) for path in bound}


def _digest(path: Path) -> str:
    """SHA-256 of the size and the contents of a file, hexadecimal; of a large one, of pieces spread over it."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _READ_WHOLE:
            digest.update(file.read())
        else:
            for piece in range(_PIECES):
                file.seek((size - _PIECE) * piece // (_PIECES - 1))
                digest.update(file.read(_PIECE))
    return digest.hexdigest()
