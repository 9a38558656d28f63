"""Numbers as people say them."""

from __future__ import annotations


def eta(seconds: float) -> str:
    """A guess: `4 s` rather than `4.2 s`."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 10 else for_people(seconds)


def for_people(seconds: float) -> str:
    """`0.4 s`, `12 s`, `7 min`, `3 h 20 min`, `2 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def counted(count: int, what: str) -> str:
    """`no workers`, `1 worker`, `2 workers`."""
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def size(nbytes: float) -> str:
    """`1.5 GB`, in powers of ten as disks and GPUs are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} bytes"
