"""The folder that a replay writes into: always a new one, so that no weights, curves or metrics are replaced."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.rundir.paths import RunDir

DEFAULT = Path("outputs/replay-N")  # N: the first number that no folder has
_CHECKPOINT = re.compile(r"checkpoint-\d+.*")


@contextmanager
def made(named: Path | None) -> Iterator[Path]:
    """Make the folder that the command line named, or the next `outputs/replay-N`.

    It is removed again if nothing was written into it.

    Raises:
        UsageError: it is in use, or has the name of a checkpoint.
    """
    folder = _next() if named is None else _own(named)
    try:
        yield folder
    finally:
        with suppress(OSError):
            folder.rmdir()  # refuses a folder that has something in it


def _own(folder: Path) -> Path:
    if (problem := _problem(folder)) is not None:
        raise UsageError(
            f"--output-dir {folder}: {problem} Name a folder that does not exist yet, or leave the option out: the "
            f"weights go to {DEFAULT} then."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _problem(folder: Path) -> str | None:
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


def _next() -> Path:
    for number in count(1):
        folder = DEFAULT.with_name(DEFAULT.name.replace("N", str(number)))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("count() has no end")
