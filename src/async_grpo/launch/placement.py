"""Which devices the processes of a run are on, and which memory its weights go through."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from async_grpo.errors import UsageError
from async_grpo.settings import Way
from async_grpo.setup import devices
from async_grpo.setup.devices import CPU, choose_device, parse_device, why_unreachable


def choose_weights(asked: Way, server: str, workers: Sequence[str], served: str | None = None) -> Way:
    """The memory to publish in: the host's where a reader's GPU cannot map the server's, unless the user has chosen.

    Args:
        served: `--server-devices`, whose vLLM server maps the weights by itself.
    """
    if asked != "auto":
        return asked
    names = [name.strip() for name in (served or "").split(",") if name.strip()]
    why = why_unreachable(server, workers, os.environ, served=names)
    if why is None:
        return asked
    print(f"weights go through host memory, which is slower (--weights host): {why}", file=sys.stderr)
    return "host"


def plan_devices(master: str | None, workers: str | None, count: int | None) -> tuple[str, tuple[str, ...]]:
    """The server's device and each worker's. Raises `UsageError` for devices that do not exist or do not add up."""
    gpus = devices.visible_gpus()
    server = choose_device(master)
    if workers is not None:
        chosen = tuple(parse_device(text.strip(), gpus) for text in workers.split(","))
        if count is not None and count != len(chosen):
            raise UsageError(f"--num-workers {count} does not fit --worker-device-ids {workers}: name one for each.")
        if (CPU in chosen) != (server == CPU) or len({device == CPU for device in chosen}) > 1:
            raise UsageError(
                "The server and its workers must all be on GPUs, or all on the CPU: they share the weights."
            )
        return server, chosen
    if server == CPU:
        return server, (CPU,) * (2 if count is None else count)
    others = [str(index) for index in range(gpus) if str(index) != server] or [server]
    count = len(others) if count is None else count
    return server, tuple(others[index % len(others)] for index in range(count))
