"""Which files belong to which task, as people write it: a path, a list, a mapping, or one of these as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from async_grpo.errors import UsageError

LARGEST = 1 << 20  # bytes of a text that is parsed
SHOWN = 60  # characters of what an error shows

Files = str | Path | Sequence[str | Path] | Mapping[str, str | Path | Sequence[str | Path]]


def files_by_task(files: Files) -> dict[str, list[Path]]:
    """The files of each task, in order.

    Raises:
        UsageError: the text cannot be read, or what it says is neither a path, a list nor a mapping.
    """
    if isinstance(files, str) and files.strip()[:1] in ("{", "["):
        files = _parsed(files)
    if isinstance(files, Mapping):
        named = [(_name(task), path) for task, paths in files.items() for path in _paths(paths, f"of task {task!r}")]
        if empty := [task for task in files if task not in dict(named)]:
            raise UsageError(f"Task {empty[0]!r} has no file.")
    else:
        named = [(path.stem.partition("__")[0], path) for path in _paths(files, "of the data")]
    found: dict[str, list[Path]] = {}
    for task, path in named:
        found.setdefault(task, []).append(path)
    if not found:
        raise UsageError("There is no file to read: give a path, a list of paths, or {task: path}.")
    return found


def _paths(given: Any, whose: str) -> list[Path]:
    paths = [given] if isinstance(given, (str, Path)) else given
    if not isinstance(paths, Sequence) or not all(isinstance(path, (str, Path)) and str(path) for path in paths):
        raise UsageError(f"The files {whose} must be a path or a list of paths, got {cut(repr(given))}.")
    try:
        return [Path(path).expanduser() for path in paths]
    except (RuntimeError, ValueError) as error:  # ~nobody, a zero byte
        raise UsageError(f"The files {whose} cannot be found: {error}.") from None


def _name(task: Any) -> str:
    if not isinstance(task, str) or not task.strip():
        raise UsageError(f"The name of a task must be a text, got {task!r}.")
    return task


class _Once(yaml.SafeLoader):
    """YAML in which no key comes twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(str(key.value) for key, _ in node.value)
        if twice := [key for key, count in keys.items() if count > 1]:
            raise UsageError(f"Task {twice[0]!r} is there twice. Give it a list of files.")
        return super().construct_mapping(node, deep)


def _parsed(text: str) -> Any:
    if len(text.encode()) > LARGEST:
        raise UsageError(f"The files are a text of {len(text):,} characters; at most {LARGEST:,} bytes are read.")
    try:
        found = yaml.load(text, _Once)  # noqa: S506  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"The files cannot be read as YAML: {cut(text)} ({cut(str(error).splitlines()[0])})") from None
    if isinstance(found, dict) and None in found.values():
        what = f"{cut(text)} has a task without a file"
        raise UsageError(f"{what}. YAML needs a space after the colon: {{math: a.parquet}}.")
    return found


def cut(text: str) -> str:
    """As much of a text as fits into a sentence."""
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"
