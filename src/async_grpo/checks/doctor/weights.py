"""Weights from one process to another and back to a number: `async_grpo_ipc` between two real processes.

`python -m async_grpo.checks.doctor.weights export|read HANDLE DEVICE` is each of them.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.checks import probe
from async_grpo.checks.doctor.finding import Finding, error, ok, warning

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS = {"cpu": 16 << 20, "cuda": 64 << 20}  # of four bytes: more than caches hold
REPEATS = 5
VERSIONS = 1 + 1 + REPEATS  # that are published: the first touches the memory, the next is not counted
TIMEOUT_S = 90.0
SLOW = 0.5  # of a raw copy
_MODULE = "async_grpo.checks.doctor.weights"
_SUBJECT = "weights"


def weight_sharing(devices: Sequence[str]) -> Iterator[Finding]:
    """One process publishes on the first device, one for each device reads: every value, and how fast.

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
    with tempfile.TemporaryDirectory(prefix="async-grpo-doctor-") as folder:
        handle = str(Path(folder) / "handle.json")
        exporter = probe.start(_MODULE, ["export", handle, writer])
        reading = probe.start(_MODULE, ["read", handle, reader])
        try:
            received = probe.answer(reading, TIMEOUT_S)
            published = probe.answer(exporter, TIMEOUT_S)  # closes its input, which ends it
            return {**received, **published}
        except probe.ChildFailed as failure:
            if exporter.poll() is not None:
                raise probe.ChildFailed(f"{failure}; the publishing one: {_why(exporter)}") from failure
            raise
        finally:
            for process in (exporter, reading):
                if process.poll() is None:
                    process.kill()
                    process.communicate()


def _why(process: subprocess.Popen[str]) -> str:
    try:
        return str(probe.answer(process, TIMEOUT_S))
    except probe.ChildFailed as failure:
        return str(failure)


def _judge(facts: dict[str, Any], writer: str, reader: str) -> Finding:
    way = f"{writer} to {reader}" if writer != reader else writer
    kind = {"cuda": "CUDA IPC", "posix": "shared host memory"}[facts["memory"]]
    found = (
        f"{way}, between two processes, by {kind}: every value arrived; mapped in {facts['attach_ms']:.0f} ms, "
        f"read at {facts['read_gbps']:.1f} GB/s (a copy within one process: {facts['raw_gbps']:.1f}), published at "
        f"{facts['publish_gbps']:.1f}"
    )
    if not facts["equal"]:
        return error(
            _SUBJECT, f"{way}: the values that arrived are not those that were published", "Please report this."
        )
    if writer.startswith("cuda") and facts["memory"] != "cuda":
        return warning(
            _SUBJECT,
            f"{found}. GPU memory cannot be shared here, so weights go through host memory",
            "Install cupy (see its line); MIG and WSL have no CUDA IPC.",
        )
    if facts["read_gbps"] < SLOW * facts["raw_gbps"]:
        return warning(
            _SUBJECT,
            found,
            "Reading is slower than a copy should be: other processes may be using the machine, or the GPUs have no "
            "peer access (see its line).",
        )
    return ok(_SUBJECT, found)


# --- the two processes


def export(handle: str, device: str) -> dict[str, Any]:
    import torch

    from async_grpo_ipc import WeightExporter

    weights = _pattern(device)
    with WeightExporter.from_tensors({"weights": weights}, handle, slots=3) as exporter:
        exporter.publish(1)
        seconds = _seconds(lambda: exporter.publish((exporter.version or 0) + 1), torch.device(device))
        sys.stdin.read()  # until the reader is done
    return {"publish_gbps": weights.nbytes / seconds / 1e9}


def read(handle: str, device: str) -> dict[str, Any]:
    import torch

    from async_grpo_ipc import open_remote_memory

    where = torch.device(device)
    expected = _pattern(device)
    own = torch.zeros_like(expected)
    memory = _wait_for_handle(handle)
    started = time.perf_counter()
    with open_remote_memory(handle, timeout_s=TIMEOUT_S, device=device) as remote:
        attach = time.perf_counter() - started
        _wait_until(lambda: remote.version == VERSIONS, "the last version")  # two at work would measure each other
        with remote.lease(timeout_s=TIMEOUT_S) as view:
            seconds = _seconds(lambda: own.copy_(view["weights"]), where)
            equal = bool(torch.equal(own, expected))
        raw = _seconds(lambda: own.copy_(expected), where)
    return {
        "memory": memory,
        "attach_ms": attach * 1e3,
        "read_gbps": own.nbytes / seconds / 1e9,
        "raw_gbps": own.nbytes / raw / 1e9,
        "equal": equal,
    }


def _wait_for_handle(handle: str) -> str:
    """The kind of memory that is published, once there is any."""
    _wait_until(Path(handle).exists, "a handle file")
    return str(json.loads(Path(handle).read_text())["memory"]["kind"])


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the publishing process did not come to {what} in {TIMEOUT_S:g} s")
        time.sleep(0.005)


def _pattern(device: str) -> Tensor:
    """Every number another one, so that nothing can arrive in another place unnoticed."""
    import torch

    return torch.arange(NUMBERS[torch.device(device).type], dtype=torch.int32, device=device)


def _seconds(copy: Callable[[], object], device: Any) -> float:
    """The median of some copies, the first not counted."""
    import torch

    seconds = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    role, *where = sys.argv[1:]
    print(json.dumps((export if role == "export" else read)(*where)))
