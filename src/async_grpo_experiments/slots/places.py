"""Where a task may run: some GPUs of this machine, or a share of its cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from async_grpo.errors import UsageError
from async_grpo.formatting import counted
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
