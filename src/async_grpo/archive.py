"""How much of `done/`, the archive of used prompt groups, a run keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

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
