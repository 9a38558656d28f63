"""Weights from one process to another: a real round trip through `async_grpo_ipc`, every value compared.

`python -m async_grpo.checks.doctor.weights export WRITER READER` publishes on one device and starts the process that
reads on the other; its last line is what was measured, as JSON.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.setup.process import end_with_parent

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = {"cpu": 16 << 20, "cuda": 64 << 20}  # of four bytes: more than caches hold
REPEATS = 5
TIMEOUT_S = 90.0
_MODULE = "async_grpo.checks.doctor.weights"
_SUBJECT = "weights"


def weight_sharing(devices: Sequence[str]) -> Iterator[Finding]:
    """One process publishes on the first device, one for each device reads.

    Args:
        devices: torch's names, e.g. `["cpu"]` or `["cuda:0", "cuda:1"]`.
    """
    for reader in devices:
        try:
            yield _judge(_measure(devices[0], reader), devices[0], reader)
        except probe.ChildFailed as failure:
            yield error(
                _SUBJECT,
                f"from {devices[0]} to {reader}, between two processes: {failure}",
                "Without this no worker gets weights. Containers: one container for all processes, or --ipc=host "
                "--pid=host. GPUs: see the lines on driver and cupy; MIG and WSL have no CUDA IPC.",
            )


def _measure(writer: str, reader: str) -> dict[str, Any]:
    found: dict[str, Any] = probe.answer(probe.start(_MODULE, ["export", writer, reader]), TIMEOUT_S)
    return found


def _judge(facts: dict[str, Any], writer: str, reader: str) -> Finding:
    way = f"{writer} to {reader}" if writer != reader else writer
    if not facts["equal"]:
        return error(_SUBJECT, f"{way}: values arrived that were not published", "Please report this.")
    kind = {"cuda": "CUDA IPC", "posix": "shared host memory"}[facts["memory"]]
    found = f"{way}, between two processes, by {kind}: every value arrived; read at {facts['read_gbps']:.1f} GB/s"
    if writer.startswith("cuda") and facts["memory"] != "cuda":
        return warning(
            _SUBJECT,
            f"{found}. GPU memory cannot be shared here, so weights go through host memory",
            "Install cupy (see its line); MIG and WSL have no CUDA IPC.",
        )
    return ok(_SUBJECT, found)


# --- the two processes


def export(writer: str, reader: str) -> dict[str, Any]:
    """Publish on `writer`, and return what a process on `reader` says of it."""
    from async_grpo_ipc import WeightExporter

    with tempfile.TemporaryDirectory(prefix="async-grpo-doctor-") as folder:
        handle = Path(folder) / "handle.json"
        with WeightExporter.from_tensors({"weights": _pattern(writer)}, handle) as exporter:
            exporter.publish(1)
            command = [sys.executable, "-m", _MODULE, "read", str(handle), reader, str(os.getpid())]
            reading = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if reading.returncode != 0:  # what it said went to the same stderr
                sys.exit(f"the reading process ended with code {reading.returncode}")
            return {**json.loads(reading.stdout.splitlines()[-1]), "memory": _memory_kind(handle)}


def read(handle: str, reader: str, exporter: str) -> dict[str, Any]:
    """Map what is published at `handle` and copy it to `reader`. Ends with the exporter."""
    end_with_parent(int(exporter))
    import torch

    from async_grpo_ipc import open_remote_memory

    expected = _pattern(reader)
    own = torch.zeros_like(expected)
    seconds = []
    with open_remote_memory(handle, device=reader) as remote, remote.lease() as view:
        for _ in range(1 + REPEATS):
            started = time.perf_counter()
            own.copy_(view["weights"])
            if own.is_cuda:
                torch.cuda.synchronize(own.device)
            seconds.append(time.perf_counter() - started)
        equal = bool(torch.equal(own, expected))
    return {"equal": equal, "read_gbps": own.nbytes / statistics.median(seconds[1:]) / 1e9}  # the first warms up


def _memory_kind(handle: Path) -> str:
    return str(json.loads(handle.read_text())["memory"]["kind"])


def _pattern(device: str) -> Tensor:
    """A different value in each place, so that nothing can arrive in another place unnoticed."""
    import torch

    return torch.arange(NUMBERS[torch.device(device).type], dtype=torch.int32, device=device)


if __name__ == "__main__":
    role, *where = sys.argv[1:]
    print(json.dumps((export if role == "export" else read)(*where)))
