"""A reader of `metrics.jsonl` for every use: one row a step, the newest.

The file is only appended to. A run that is resumed trains the steps after its checkpoint again, and logs them again:
it writes a line `{"step": N, "resumed": true}`, and what was logged of later steps before it has not happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.rundir.reading import LineReader, parse_object
from async_grpo.rundir.shape import is_number, shaped

RESUMED = "resumed"  # of a line that says from which step a resumed run goes on
SET = "eval_set"  # of TRL's own evaluation of several datasets: the name of the one that the line is about
_NUMBERS = (  # of an entry, where it has them; nothing relies on the others
    *("reward", "eval_success_rate", "eval_rewards/accuracy/mean", "async/rollouts_per_second"),
    *("async/staleness_mean", "async/staleness_max", "async/padding_fraction"),
)

Entry = dict[str, Any]  # a line of the file


class TakenBack(NamedTuple):
    """Every entry of a later step than this one, of those before it, has not happened."""

    after: int


class Entries:
    """Follows the file of a run, from the byte at `position` on."""

    def __init__(self, path: Path, position: int = 0) -> None:
        self._reader = LineReader(path, position)
        self._lines = 0
        self.broken: dict[int, str] = {}  # by the number of the line: why it cannot be used

    def news(self) -> Iterator[Entry | TakenBack]:
        """Yield what was appended since the last call. `BadFileError` if the file is none."""
        for line in self._reader.new_lines():
            self._lines += 1
            try:
                entry = parse_entry(line)
            except BadFileError as error:
                self.broken[self._lines] = str(error)
                continue
            yield TakenBack(int(entry["step"])) if entry.get(RESUMED) is True else entry


def read(path: Path, at_most: int | None = None) -> list[Entry]:
    """The entries of a run, or of its last `at_most` bytes, oldest first; none where there is no file."""
    start = max(0, path.stat().st_size - at_most) if at_most is not None and path.exists() else 0
    return happened(Entries(path, start).news())


def happened(news: Iterable[Entry | TakenBack]) -> list[Entry]:
    """The entries that were not taken back."""
    found: list[Entry] = []
    for item in news:
        if isinstance(item, TakenBack):
            found = [entry for entry in found if step_of(entry) <= item.after]
        else:
            found.append(item)
    return found


def step_of(entry: Entry) -> int:
    """The step that an entry is about: of an evaluation its version, as training goes on until it is over."""
    step, version = int(entry["step"]), entry.get("eval_version")
    return int(version) if is_number(version) and 0 <= version <= step else step


def parse_entry(line: str) -> Entry:
    """One line of the file. `BadFileError` where it is not one of ours, or a number that we use is none."""
    entry = parse_object(line)
    shaped(int, entry.get("step"), "step")
    for name in _NUMBERS:
        if entry.get(name) is not None:
            shaped(float, entry[name], name)
    return entry
