"""Weights from one process to another: a real round trip through `async_grpo_ipc`, every value compared.

`python -m async_grpo.checks.doctor.weights` is both of them: the one that publishes asks the one that reads.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Finding, error, ok, warning
from async_grpo.setup.devices import hold_to_device, why_unreachable
from async_grpo.setup.process import end_with_parent

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = {"cpu": 16 << 20, "cuda": 64 << 20}  # of four bytes: more than caches hold
REPEATS = 5
TIMEOUT_S = 120.0
_MODULE = "async_grpo.checks.doctor.weights"
_SUBJECT = "weights"


def weight_sharing(devices: Sequence[str]) -> Iterator[Finding]:
    """One process publishes on the first device, one for each device reads.

    Args:
        devices: torch's names, e.g. `["cpu"]` or `["cuda:0", "cuda:1"]`.
    """
    writer = devices[0]
    for reader in devices:
        indices = [device.partition(":")[2] for device in (writer, reader)]
        apart = why_unreachable(indices[0], indices[1:], os.environ) if reader.startswith("cuda") else None
        try:
            yield _judge(_measure(writer, reader, "host" if apart else "auto"), writer, reader, apart)
        except probe.ChildFailed as failure:
            yield error(
                _SUBJECT,
                f"from {writer} to {reader}, between two processes: {failure}",
                "Without this no worker gets weights. Containers: one container for all processes, or --ipc=host "
                "--pid=host. GPUs: see the lines on driver and cupy; WSL has no CUDA IPC.",
            )


def _measure(writer: str, reader: str, way: str) -> dict[str, Any]:
    """Ask two processes, each of which sees its own GPU alone, as a server and a worker do."""
    seen = ["cuda:0" if device.startswith("cuda") else device for device in (writer, reader)]
    question = {"way": way, "writer": seen[0], "reader": seen[1], "reader_sees": _sees(reader)}
    env = {**os.environ, **_sees(writer)}
    found: dict[str, Any] = probe.ask(_MODULE, question, timeout_s=TIMEOUT_S, env=env)
    return found


def _sees(device: str) -> dict[str, str]:
    kind, _, index = device.partition(":")
    held = dict(os.environ)
    if kind == "cuda":
        hold_to_device(index, held)
    return {name: held[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in held}


def _judge(facts: dict[str, Any], writer: str, reader: str, apart: str | None) -> Finding:
    way = f"{writer} to {reader}" if writer != reader else writer
    if not facts["equal"]:
        return error(_SUBJECT, f"{way}: values arrived that were not published", "Please report this.")
    kind = {"cuda": "CUDA IPC", "posix": "shared host memory"}[facts["memory"]]
    found = f"{way}, between two processes, by {kind}: every value arrived; read at {facts['read_gbps']:.1f} GB/s"
    if apart:
        fix = (
            "Usual for consumer cards. Put server and workers on GPUs that reach each other (nvidia-smi topo -m)."
            if reader != writer
            else "Usual in containers that share neither the pid nor the ipc namespace, and in sandboxes."
        )
        return warning(_SUBJECT, f"{found}, as a run does it here: {apart}", fix)
    if writer.startswith("cuda") and facts["memory"] != "cuda":
        fix = "Install cupy (see its line); WSL has no CUDA IPC."
        return warning(_SUBJECT, f"{found}. GPU memory cannot be shared here, so weights go through host memory", fix)
    return ok(_SUBJECT, found)


# --- the two processes


def answer(question: dict[str, Any]) -> dict[str, Any]:
    return _export(**question) if "writer" in question else _read(**question)


def _export(writer: str, reader: str, reader_sees: dict[str, str], way: Any) -> dict[str, Any]:
    """Publish on `writer`, and ask a process with the environment variables `reader_sees` that reads on `reader`."""
    from async_grpo_ipc import WeightExporter

    with tempfile.TemporaryDirectory(prefix="async-grpo-doctor-") as folder:
        handle = Path(folder) / "handle.json"
        with WeightExporter.from_tensors({"weights": _pattern(writer)}, handle, way=way) as exporter:
            exporter.publish(1)
            question = {"handle": str(handle), "reader": reader, "exporter": os.getpid()}
            env = {**os.environ, **reader_sees}
            measured = probe.ask(_MODULE, question, timeout_s=TIMEOUT_S / 2, env=env)
            return {**measured, "memory": json.loads(handle.read_text())["memory"]["kind"]}


def _read(handle: str, reader: str, exporter: int) -> dict[str, Any]:
    """Map what is published at `handle` and copy it to `reader`. Ends with the exporter."""
    end_with_parent(exporter)
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


def _pattern(device: str) -> Tensor:
    """A different value in each place, so that nothing can arrive in another place unnoticed."""
    import torch

    return torch.arange(NUMBERS[torch.device(device).type], dtype=torch.int32, device=device)


if __name__ == "__main__":
    probe.answer(answer)
