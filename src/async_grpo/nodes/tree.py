"""The folder of a setup file, as it is sent to nodes."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

from async_grpo.errors import UsageError
from async_grpo.formatting import size

MOST_BYTES = 10_000_000
GIT_S = 30.0


def packed(config: Path) -> bytes:
    """A tar file of the folder that `config` is in. `UsageError`: it has more than `MOST_BYTES`."""
    folder, total, buffer = config.parent, 0, io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path in _files(config):
            total += path.stat().st_size
            if total > MOST_BYTES:
                raise UsageError(
                    f"The folder of the setup file, {folder}, is sent to all nodes, and has more than "
                    f"{size(MOST_BYTES)}: put the setup file and its modules into a folder of their own, or name what "
                    "is not theirs (data, models, outputs) in a .gitignore there."
                )
            tar.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    return buffer.getvalue()


def is_there(data: bytes, folder: Path) -> bool:
    """Whether a folder has the files of `packed` already, as on a file system that machines share."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            path, sent = folder / member.name, tar.extractfile(member)
            if sent is None or not path.is_file() or path.read_bytes() != sent.read():
                return False
            if path.stat().st_uid != member.uid:  # who may have put more there, which would be imported
                return False
    return True


def unpack(data: bytes, folder: Path) -> None:
    """Write the files of `packed` into a new folder."""
    folder.mkdir(mode=0o700)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        tar.extractall(folder, filter="data")


def _files(config: Path) -> list[Path]:
    """The setup file, and beside it what is not hidden and git, where there is one, does not ignore."""
    folder = config.parent
    named = _known_to_git(folder)
    found = _walk(folder) if named is None else (folder / name for name in named)
    return sorted({config, *(path for path in found if path.is_file() and not path.is_symlink())})


def _known_to_git(folder: Path) -> list[Path] | None:
    command = ["git", "-C", str(folder), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    names = (Path(name) for name in ran.stdout.decode(errors="surrogateescape").split("\0") if name)
    shown = (name for name in names if not any(part.startswith(".") for part in name.parts))
    return [name for name in shown if not any(_is_other(folder / above) for above in name.parents[:-1])]


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if not path.is_dir():
            yield path
        elif path.name != "__pycache__" and not _is_other(path):
            yield from _walk(path)


def _is_other(folder: Path) -> bool:
    """Whether a folder is a run directory, a checkpoint or an environment of Python's."""
    return any((folder / name).is_file() for name in ("run.json", "trainer_state.json", "pyvenv.cfg"))
