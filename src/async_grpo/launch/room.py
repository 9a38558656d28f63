"""Whether this machine has room for as many workers as a run is to have."""

from __future__ import annotations

import os

from async_grpo.errors import UsageError
from async_grpo.formatting import counted, size

WORKER_BYTES = 400_000_000  # of its own, with torch, transformers and TRL imported and no model yet: measured, on a CPU


def require_room(workers: int) -> None:
    """`UsageError` where more workers are asked for than the free memory has room for."""
    import psutil

    free = psutil.virtual_memory().available
    most = max(1, free // WORKER_BYTES)
    if workers > most:
        raise UsageError(
            f"{workers:,} workers need {size(workers * WORKER_BYTES)} of memory ({size(WORKER_BYTES)} each before they "
            f"load a model), and {size(free)} are free. There is room for {most:,} at most: --num-workers."
        )


def crowding(workers: int) -> str:
    """What to say where the workers are more than the cores; empty where they are not."""
    cores = len(os.sched_getaffinity(0))
    if workers <= cores:
        return ""
    return (
        f"{workers:,} workers and the server share {counted(cores, 'core')}, so each has less than one. Fewer may be "
        f"faster: --num-workers {cores}"
    )
