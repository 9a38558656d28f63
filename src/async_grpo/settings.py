"""What the command line decides about a run; passed from the launcher to its children as the same flags."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LIMIT = re.compile(r"(\d+)\s*(KB|MB|GB|TB)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ArchiveLimit:
    """Keep the newest so many groups, or so many bytes of them."""

    amount: int
    in_bytes: bool = False

    @classmethod
    def parse(cls, text: str) -> ArchiveLimit:
        """`"10000"` groups, or `"2GB"`. Raises `UsageError` for anything else."""
        match = _LIMIT.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--keep-done must be a number of groups or a size such as 500MB or 2GB, got {text!r}.")
        amount, unit = match.groups()
        return cls(int(amount) * _UNITS[unit.upper()], in_bytes=True) if unit else cls(int(amount))

    def __str__(self) -> str:
        return f"{self.amount // 1000}KB" if self.in_bytes else str(self.amount)

    def groups(self, done: Path) -> int:
        """How many of the groups in `done` may stay, the newest first."""
        if not self.in_bytes:
            return self.amount
        room, kept = self.amount, 0
        for file in sorted(done.glob("*/*"), key=lambda path: path.name, reverse=True):
            room -= file.stat().st_size
            if room < 0:
                break
            kept += 1
        return kept


DEFAULT_LIMIT = ArchiveLimit(10_000)


GENERATORS = ("hf", "vllm")
CORRECTIONS = ("bypass", "decoupled", "tis", "icepop", "none")
STALL_WARNING_S = 60.0
STOP_GRACE_S = 9.0  # a run ends within 10 s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """For the parameter server. Field names are the flags' names."""

    steps: int | None = None  # overrides max_steps of the setup file
    seed: int | None = None  # overrides its seed
    max_staleness: int = 4  # in policy versions
    correction: str = "bypass"  # one of CORRECTIONS
    filter_zero_variance: bool = False  # replace groups whose rewards are all equal
    deterministic: bool = False  # the same seed gives the same run, bit for bit
    max_attempts: int = 3  # tries of a job before it is set aside
    keep_done: ArchiveLimit = DEFAULT_LIMIT  # of the archive of used groups
    resume: bool = False
    stall_warning: float = STALL_WARNING_S  # so long without progress is told, with what is waited for


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """For a rollout worker. Field names are the flags' names."""

    groups_per_claim: int | None = None  # None: an even share of what is pending
    score_concurrency: int = 4  # groups that are scored while the next ones are generated
    stall_warning: float = STALL_WARNING_S  # as in `TrainingSettings`
    generator: str | None = None  # one of GENERATORS; None: what the setup file and the machine suggest
    in_flight_update: str = "off"  # on: new weights are adopted while groups are generated


def as_flags(settings: TrainingSettings | WorkerSettings) -> list[str]:
    """`TrainingSettings(seed=3, resume=True, …)` -> `["--seed", "3", "--resume", …]`."""
    flags: list[str] = []
    for field in fields(settings):
        value: Any = getattr(settings, field.name)
        flag = f"--{field.name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, str(value)]
    return flags
