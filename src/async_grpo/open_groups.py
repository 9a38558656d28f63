"""The queue as `status` shows it: by plain listings, of a queue that need not exist yet.

No part of the protocol, in which no clock is ever compared: the files' times are here for people.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from async_grpo.queue_names import COMPLETE, FAILED, PENDING, PROCESSING, parse_name, parse_set_aside


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGroups:
    """Prompt groups by state; `oldest_*` is about the open one with the lowest number."""

    pending: int
    processing: int
    complete: int
    oldest_group: int | None = None
    oldest_state: str = ""
    oldest_s: float | None = None  # since it was issued, or finished; by the files' times, for people


def open_groups(root: Path) -> OpenGroups:
    """By one listing. Files that come and go may be missed, as in `ls`."""
    names = sorted(filter(None, map(parse_name, _listed(root / "queue"))))
    states = [name.state for name in names]
    oldest = names[0] if names else None
    return OpenGroups(
        pending=states.count(PENDING),
        processing=states.count(PROCESSING),
        complete=states.count(COMPLETE),
        oldest_group=oldest.seq if oldest else None,
        oldest_state=oldest.state if oldest else "",
        oldest_s=_age_s(root / "queue" / str(oldest)) if oldest else None,
    )


def given_up(root: Path) -> int:
    """How many jobs were given up."""
    return sum(
        aside is not None and aside.kind == FAILED for aside in map(parse_set_aside, _listed(root / "quarantine"))
    )


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are all that is asked for
    except (FileNotFoundError, NotADirectoryError):
        return []


def _age_s(path: Path) -> float | None:
    try:
        return round(max(0.0, time.time() - path.stat(follow_symlinks=False).st_mtime), 3)
    except FileNotFoundError:  # it went on
        return None
