"""Training runs of a benchmark, kept in a file as they are done: a benchmark of hours can be run part by part."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from multiprocessing.pool import AsyncResult
from pathlib import Path
from typing import Any, TypeVar

CellT = TypeVar("CellT")
OutcomeT = TypeVar("OutcomeT")


def outcomes(
    train: Callable[[CellT], OutcomeT], cells: Sequence[CellT], *, processes: int, until: float
) -> Iterator[OutcomeT]:
    """Train the cells in their order, as many as can be begun before `until` (monotonic)."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        left = list(cells)
        running: list[AsyncResult[OutcomeT]] = []
        while left or running:
            while left and len(running) < processes and time.monotonic() < until:
                running.append(pool.apply_async(train, (left.pop(0),)))
            if not running:
                return
            yield running.pop(0).get()


def read_outcomes(path: Path | None, outcome: Callable[..., OutcomeT], cell: Callable[..., Any]) -> list[OutcomeT]:
    """The training runs that were done before: dataclasses, of which field `cell` is one as well."""
    if path is None or not path.exists():
        return []
    told = [json.loads(line) for line in path.read_text().splitlines()]
    return [outcome(**{**entry, "cell": cell(**entry["cell"])}) for entry in told]


def keep(path: Path | None, outcome: Any) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
