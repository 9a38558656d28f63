"""`ranks.json`: the ranks of a trainer on several machines, as rank 0 hears of them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from async_grpo.errors import AsyncGRPOError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.shape import as_json, read_shaped


@dataclass(kw_only=True)
class Beat:
    """What a rank says of itself, or what starts the ranks of a machine."""

    count: int = 0
    step: int = 0  # version that it trains on
    doing: str = "loading"
    stop: bool = False  # it was asked to end, as by Ctrl-C on its machine
    left: bool = False  # in good order


def write_ranks(path: Path, beats: Mapping[str, Beat]) -> None:
    """Write the file whole, where any does something else than the file says."""
    ranks = {name: as_json(replace(beat, count=0)) for name, beat in beats.items() if name.startswith("rank")}
    with suppress(AsyncGRPOError, OSError):  # it is for `status`
        if ranks != {name: as_json(beat) for name, beat in read_ranks(path).items()}:
            write_json(path, ranks)


def read_ranks(path: Path) -> dict[str, Beat]:
    """By name, "rank 1 on machine 1 (gpu1)"; none where there is no file that can be used."""
    return read_shaped(dict[str, Beat], path) or {}
