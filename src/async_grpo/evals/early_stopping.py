"""When evaluations no longer improve: the rule of transformers' `EarlyStoppingCallback`, on `evaluations.jsonl`.

The callback itself needs evaluations of the trainer's own, for which training waits; here the workers evaluate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from async_grpo.errors import BadFileError
from async_grpo.rundir.reading import parse_object, read_file

FIGURE = "reward_mean"  # of all completions of all problems


@dataclass(frozen=True)
class Best:
    """The best evaluation so far."""

    step: int
    value: float
    without: int  # evaluations in a row that were not better than the best before them by more than the threshold


def best_of(evaluations: Iterable[tuple[int, float]], threshold: float) -> Best | None:
    """Return the best of `(step, value)` in their order; None without any."""
    best: Best | None = None
    for step, value in evaluations:
        better = best is None or value > best.value
        enough = best is None or value - best.value > threshold
        without = 0 if best is None or enough else best.without + 1
        best = Best(step, value, without) if best is None or better else Best(best.step, best.value, without)
    return best


def read(file: Path) -> list[tuple[int, float]]:
    """Return the evaluations of a run that have the figure. A line that is still being written is left for later."""
    found = []
    for line in read_file(file).splitlines() if file.is_file() else []:
        try:
            record = parse_object(line)
            found.append((int(record["step"]), float(record["figures"][FIGURE]["value"])))
        except (BadFileError, ValueError, KeyError, TypeError):
            continue
    return found


class ImprovementWatch:
    """Looks at the evaluations of a run again when there is a new one.

    Args:
        patience: evaluations without improvement that end the training; 0: never.
    """

    def __init__(self, file: Path, patience: int, threshold: float) -> None:
        self._file, self._patience, self._threshold = file, patience, threshold
        self._size = -1
        self._best: Best | None = None

    def look(self) -> Best | None:
        """The best evaluation so far; None without one, or without patience."""
        size = self._file.stat().st_size if self._patience and self._file.is_file() else 0
        if size != self._size:
            self._size, self._best = size, best_of(read(self._file), self._threshold) if size else None
        return self._best

    def reason_to_stop(self) -> str:
        """Empty as long as there is none."""
        best = self.look()
        if best is None or best.without < self._patience:
            return ""
        since = "1 evaluation has" if best.without == 1 else f"{best.without} evaluations in a row have"
        return (
            f"{since} not improved the mean reward by more than {self._threshold:g}: the best was {best.value:.3f} at "
            f"step {best.step}"
        )
