"""`refused.json`: why a worker has ended the run. The server ends with the same sentence, whoever has started it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from async_grpo.errors import RunRefused
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import naming, read_object
from async_grpo.rundir.shape import shaped

FILE = "refused.json"


@dataclass(frozen=True, slots=True)
class Refusal:
    worker: str  # its name in the queue
    why: str  # the sentence of its error


def write_refusal(root: Path, worker: str, error: RunRefused) -> None:
    """Have the server of the run in `root` end. `DiskFullError`: there is no space to say so."""
    write_json(root / FILE, asdict(Refusal(worker, str(error))))


def read_refusal(root: Path) -> Refusal | None:
    """Why a worker has ended the run, None if none has. `BadFileError`: the file is not a worker's."""
    try:
        data = read_object(root / FILE)
    except FileNotFoundError:
        return None
    with naming(root / FILE):
        return shaped(Refusal, data)


def raise_refusal(root: Path) -> None:
    """Raise the `RunRefused` that ended a worker, if one was."""
    if (refusal := read_refusal(root)) is not None:
        raise RunRefused(refusal.why)
