"""Which ports of this machine a run gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from async_grpo.errors import UsageError
from async_grpo.serving.vllm_server import is_free


def choose(pairs: Sequence[tuple[int, int]], *, what: str, say: Callable[[str], None]) -> tuple[int, int]:
    """The first pair of which both ports are free. Says which are taken.

    Raises:
        UsageError: no pair is free.
    """
    for pair in pairs:
        taken = [port for port in pair if not is_free(port)]
        if not taken:
            if pair != pairs[0]:
                say(f"{what} takes the next free ports, {pair[0]} and {pair[1]}")
            return pair
        if pair == pairs[0]:
            say(f"{what}: port {' and '.join(map(str, taken))} is taken by another program")
    first, last = pairs[0], pairs[-1]
    raise UsageError(
        f"{what}: of all ports from {first[0]} to {last[0]}, none is free together with its group port. Choose "
        "another --base-port."
    )
