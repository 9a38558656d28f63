"""`consumed.jsonl`: which optimizer step used which prompt groups, for `audit` and `replay`.

Every process that trains begins with a line that says where it went on from; later lines of older processes for steps
after that one are history that the checkpoint does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_grpo.line_file import LineFile


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


def final_history(path: Path) -> Iterator[tuple[int, UsedBatch]]:
    """`(step, batch)` in the order of training, without what a later process did not go on from."""
    history: list[tuple[int, UsedBatch]] = []
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if "resumed_from" in entry:
            history = [used for used in history if used[0] <= (entry["resumed_from"] or 0)]
        elif "step" in entry:
            step = entry.pop("step")
            history.append((step, UsedBatch(**entry)))
    yield from history
