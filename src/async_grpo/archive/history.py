"""`consumed.jsonl`: which optimizer step used which prompt groups, for `audit` and `replay`.

Every process that trains begins with a line that says where it went on from; later lines of older processes for steps
after that one are history that the checkpoint does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.rundir.files import LineFile


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedBatch:
    """One generation batch that the trainer was given."""

    version_used: int  # the trainer's version when it took the batch
    seqs: list[int]
    policy_versions: list[int]  # that generated each of them


class ConsumptionRecord:
    """Appends to `path`; each line is complete before the next checkpoint can refer to it."""

    def __init__(self, path: Path, *, run_id: str, resumed_from: int | None, max_staleness: int) -> None:
        self._file = LineFile(path)
        self._append(run_id=run_id, resumed_from=resumed_from, max_staleness=max_staleness)

    def used(self, step: int, batches: Iterable[UsedBatch]) -> None:
        """Optimizer step `step` is done, and these batches were used for it."""
        for batch in batches:
            self._append(
                step=step,
                version_used=batch.version_used,
                seqs=batch.seqs,
                policy_versions=batch.policy_versions,
            )

    def dropped(self, seq: int, reason: str) -> None:
        """A group will not be used: it was over age, or all its rewards were equal."""
        self._append(dropped=seq, reason=reason)

    def sync(self) -> None:
        """Everything said so far survives a power cut: call it before a checkpoint says that it happened.

        `DiskFullError` if there is no room for it.
        """
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _append(self, **entry: Any) -> None:
        self._file.append(json.dumps(entry))


class Started(NamedTuple):
    """A process that trains begins."""

    run_id: str
    resumed_from: int | None  # step of its checkpoint
    max_staleness: int


class Used(NamedTuple):
    """An optimizer step and a batch that it used."""

    step: int
    batch: UsedBatch


class Dropped(NamedTuple):
    """A finished group that is not used."""

    seq: int
    reason: str


def parse_entry(line: str) -> Started | Used | Dropped:
    """One line of the record. Raises `ValueError`, which says what is wrong with it."""
    try:
        entry = json.loads(line)
        if "resumed_from" in entry:
            return Started(entry["run_id"], entry["resumed_from"], entry["max_staleness"])
        if "dropped" in entry:
            return Dropped(int(entry["dropped"]), str(entry.get("reason", "")))
        step = entry.pop("step")
        batch = UsedBatch(**entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if len(batch.seqs) != len(batch.policy_versions):
        raise ValueError(f"{len(batch.seqs)} groups and {len(batch.policy_versions)} policy versions")
    return Used(step, batch)


def final_history(path: Path) -> Iterator[tuple[int, UsedBatch]]:
    """`(step, batch)` in the order of training, without what a later process did not go on from."""
    history: list[tuple[int, UsedBatch]] = []
    for entry in map(parse_entry, path.read_text().splitlines()):
        if isinstance(entry, Started):
            history = [used for used in history if used[0] <= (entry.resumed_from or 0)]
        elif isinstance(entry, Used):
            history.append((entry.step, entry.batch))
    yield from history
