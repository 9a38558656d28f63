"""Processes of the tests on a GPU, and the device that they run on: `cuda:0`, or what GPU_TESTS_DEVICE says.

With GPU_TESTS_DEVICE=cpu the tests that can run on a CPU do, in shared host memory: `scripts/gpu_check.sh --dry-run`.
Run as a script this file is a reader or a writer: `python on_device.py ROLE ARGUMENTS...`, answers as JSON lines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from async_grpo_ipc import ExporterDiedError, WeightExporter, open_remote_memory

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda:0")
ON_CPU = DEVICE == "cpu"
DEADLINE_S = 120.0
TENSORS, ELEMENTS = 64, 1 << 18


def need_device() -> None:
    """Skip without a GPU, unless the test is to run on the CPU."""
    if ON_CPU:
        return
    pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def synchronize() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


class Actor:
    """A process that runs a role of this file."""

    def __init__(self, role: str, *arguments: object) -> None:
        command = [sys.executable, __file__, role, *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended without an answer: {self.process.wait(DEADLINE_S)}"
        return dict(json.loads(line))

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(command, file=self.process.stdin, flush=True)
        return self.answer()

    def __enter__(self) -> Actor:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def counting_tensors() -> dict[str, Tensor]:
    return {f"t{index}": torch.zeros(ELEMENTS, device=DEVICE) for index in range(TENSORS)}


def counting_model() -> nn.Module:
    model = nn.Module()
    for name, tensor in counting_tensors().items():
        model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return model


def wrong_elements(model: nn.Module, version: int) -> int:
    """How many elements are not their version's: every element of version v is v."""
    return int(sum((parameter != float(version)).sum() for parameter in model.parameters()))


def read_counting(handle: str, way: str, seconds: str) -> None:
    """Read version after version, by copy or in place, and check every element, twice."""
    remote = open_remote_memory(handle, timeout_s=DEADLINE_S, device=DEVICE)
    model = counting_model()
    adopt = remote.pull if way == "pull" else remote.alias
    end = time.monotonic() + float(seconds)
    reads = torn = last = backwards = 0
    while time.monotonic() < end:
        version = adopt(model) if way == "pull" or not reads else remote.refresh()
        torn += bool(wrong_elements(model, version)) or bool(wrong_elements(model, version))
        reads, backwards, last = reads + 1, backwards + (version < last), version
        if way == "alias" and reads % 3 == 0:
            remote.release()
    say(reads=reads, torn=torn, backwards=backwards, last=last)
    remote.close()


def export_and_stay(handle: str, value: str) -> None:
    tensors = counting_tensors()
    for tensor in tensors.values():
        tensor.fill_(float(value))
    exporter = WeightExporter.from_tensors(tensors, handle)
    exporter.publish(int(value))
    say(pid=os.getpid(), kind=json.loads(Path(handle).read_text())["memory"]["kind"])
    sys.stdin.read()


def read_when_told(handle: str) -> None:
    """Alias, and at every line of input say what the memory shows: also after the exporter's death, whatever it is."""
    remote = open_remote_memory(handle, timeout_s=DEADLINE_S, device=DEVICE)
    model = counting_model()
    version = remote.alias(model)
    say(version=version)
    for _ in sys.stdin:
        try:
            seen = {"wrong": wrong_elements(model, version)}
        except RuntimeError as error:  # CUDA's
            seen = {"error": str(error).splitlines()[0]}
        try:
            remote.refresh(0.1)
            said = "refreshed"
        except (ExporterDiedError, RuntimeError) as error:
            said = f"{type(error).__name__}"
        say(**seen, refresh=said)


def alias_from_loaded(handle: str, layers: str, width: str) -> None:
    """A worker: a loaded model, which then aliases; how much of the device's memory it takes before and after."""
    loaded = stack(int(layers), int(width))
    synchronize()
    before = reserved()
    remote = open_remote_memory(handle, timeout_s=DEADLINE_S, device=DEVICE)
    version = remote.alias(loaded)
    if not ON_CPU:
        torch.cuda.empty_cache()
    values = sorted({float(parameter.detach().flatten()[0]) for parameter in loaded.parameters()})
    say(version=version, loaded=before, aliased=reserved(), values=values)
    sys.stdin.readline()
    remote.close()


def reserved() -> int:
    """Bytes that torch holds of the GPU in this process."""
    return 0 if ON_CPU else torch.cuda.memory_reserved()


def stack(layers: int, width: int, *, frozen: int = 0) -> nn.Module:
    dtype = torch.float32 if ON_CPU else torch.bfloat16
    model = nn.Sequential(*[nn.Linear(width, width, device=DEVICE, dtype=dtype) for _ in range(layers)])
    for layer in model[:frozen]:
        layer.requires_grad_(False)
    return model


ROLES = {role.__name__: role for role in (read_counting, export_and_stay, read_when_told, alias_from_loaded)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
