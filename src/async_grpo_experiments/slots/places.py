"""Where tasks may run: GPUs of this machine or shares of its cores, and which of these are free for which task."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from async_grpo.errors import UsageError
from async_grpo.formatting import counted, size
from async_grpo.setup.devices import physical_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One place. A task has it alone, or shares it with others up to its bytes."""

    name: str  # `gpu0`, `gpu2-3`, `core1`, `cores0-3`
    gpus: tuple[str, ...] = ()  # as indices within the CUDA_VISIBLE_DEVICES of this process
    cores: tuple[int, ...] = ()  # empty: all that this process has
    bytes: int | None = None  # memory that tasks may share; None: it is not shared

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """`env` for a process of this place: it sees its own GPUs, and no others."""
        visible = ",".join(physical_gpus(self.gpus, env)) if self.gpus else ""
        return {**env, "CUDA_VISIBLE_DEVICES": visible}


def gpu_places(visible: int, *, each: int, first: int = 0, at_most: int | None = None) -> list[Place]:
    """Places of `each` GPUs, from GPU `first` on: as many as there are GPUs for, or `at_most`.

    Raises:
        UsageError: the GPUs are too few for one place, or for `at_most`.
    """
    possible = max(0, visible - first) // each
    if possible < max(1, at_most or 1):
        wanted = f"{counted(at_most, 'place')} of " if at_most is not None and at_most > 1 else ""
        raise UsageError(
            f"{wanted}{counted(each, 'GPU')} from GPU {first} on were asked for, and {counted(visible, 'GPU')} can be "
            f"seen here (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')!r}). Ask for fewer GPUs a "
            "run, for fewer runs at once, or start at a lower GPU."
        )
    starts = [first + each * index for index in range(min(possible, at_most or possible))]
    chosen = [tuple(str(gpu) for gpu in range(start, start + each)) for start in starts]
    return [Place(name="gpu" + "-".join(gpus), gpus=gpus) for gpus in chosen]


def core_pairs() -> int:
    """How many tasks without a GPU run at a time: each has a server and a worker, a core each."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def core_places(count: int, cores: Sequence[int] | None = None) -> list[Place]:
    """`count` places that share the cores of this process evenly; with fewer cores than places, places share cores."""
    mine = sorted(os.sched_getaffinity(0) if cores is None else cores)
    each = max(1, len(mine) // count)
    shares = [tuple(mine[(index * each + offset) % len(mine)] for offset in range(each)) for index in range(count)]
    names = [_name(share) for share in shares]
    shared = len(set(names)) < len(names)
    return [
        Place(name=f"{name}.{index}" if shared else name, cores=share)
        for index, (name, share) in enumerate(zip(names, shares, strict=True))
    ]


def _name(cores: tuple[int, ...]) -> str:
    return f"core{cores[0]}" if len(cores) == 1 else f"cores{cores[0]}-{cores[-1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a task takes of the places."""

    gpus: int = 1  # places that it takes together
    bytes: int | None = None  # of a place that has bytes, which it shares with others; None: it has the place alone
    spreads: bool = False  # it takes places beyond `gpus` that nothing else waits for

    @property
    def alone(self) -> bool:
        return self.bytes is None or self.gpus > 1


class Packing:
    """The places, and what is taken of each.

    >>> packing = Packing([Place(name="gpu0", bytes=80)])
    >>> packing.take("a", Need(bytes=50)).name
    'gpu0'
    >>> packing.take("b", Need(bytes=50)) is None
    True
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = list(places)
        self._free = list(places)  # by when they became free
        self._taken: dict[str, tuple[tuple[Place, ...], int | None]] = {}  # by task; None: alone

    def take(self, task: str, need: Need) -> Place | None:
        """The place of a task from now on; None if it does not fit now."""
        found = self._alone(need.gpus) if need.alone else self._shared(need)
        if not found:
            return None
        self._free = [place for place in self._free if place not in found]
        self._taken[task] = (found, None if need.alone else need.bytes)
        return found[0] if len(found) == 1 else _together(found)

    def give_back(self, task: str) -> None:
        places, _ = self._taken.pop(task)
        in_use = {place.name for others, _ in self._taken.values() for place in others}
        self._free += [place for place in places if place.name not in in_use]

    def idle(self) -> int:
        """The number of places with nothing in them."""
        return len(self._free)

    def spread(self, need: Need, waiting: Sequence[Need]) -> Need:
        """What a task takes of the empty places that nothing else waits for, shared with others that spread.

        Args:
            waiting: of all tasks that could start now, this one too.
        """
        if not need.spreads:
            return need
        share = (self.idle() - sum(other.gpus for other in waiting if not other.spreads)) // sum(
            other.spreads for other in waiting
        )
        return need if share <= need.gpus else replace(need, gpus=share)

    def refuse(self, names: Iterable[tuple[str, Need]]) -> None:
        """`UsageError` for a task that no place can ever take."""
        largest = max((place.bytes or 0 for place in self._places), default=0)
        for name, need in names:
            if need.gpus > len(self._places):
                raise UsageError(f"{name} needs {need.gpus} places at once, and there are {len(self._places)}.")
            if need.bytes is not None and not need.alone and need.bytes > largest and self._all_have_bytes():
                raise UsageError(
                    f"{name} needs {size(need.bytes)}, and the largest place has {size(largest)}. Give it a smaller "
                    "batch or a smaller model, or a larger GPU."
                )

    def _all_have_bytes(self) -> bool:
        return all(place.bytes is not None for place in self._places)

    def _alone(self, count: int) -> tuple[Place, ...]:
        return tuple(self._free[:count]) if len(self._free) >= count else ()

    def _shared(self, need: Need) -> tuple[Place, ...]:
        """The fullest place that has capacity; among empty ones the first that became free."""
        assert need.bytes is not None
        by_use = [*self._free, *(place for place in self._places if place not in self._free)]
        fitting = [
            (left, order, place)
            for order, place in enumerate(by_use)
            if (left := self._left(place)) is not None and left >= need.bytes
        ]
        return (min(fitting)[2],) if fitting else self._alone(1) if not self._all_have_bytes() else ()

    def _left(self, place: Place) -> int | None:
        """Bytes of a place that nobody has; None: it is not shared."""
        taken = [used for places, used in self._taken.values() if place in places]
        if place.bytes is None or None in taken:
            return None
        return place.bytes - sum(used or 0 for used in taken)


def _together(places: Sequence[Place]) -> Place:
    return Place(
        name="+".join(place.name for place in places),
        gpus=tuple(chain.from_iterable(place.gpus for place in places)),
        cores=tuple(sorted({*chain.from_iterable(place.cores for place in places)})),
    )
