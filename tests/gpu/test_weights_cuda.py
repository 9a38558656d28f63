"""CUDA IPC on a real GPU: `pytest -m gpu tests/gpu/test_weights_cuda.py -s` prints what it measured.

One GPU is enough for all but the peer copy: readers are processes of their own. Needs cupy.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from async_grpo_ipc import WeightExporter, open_remote_memory
from async_grpo_ipc.memory.cuda import NO_PEER
from async_grpo_ipc.staging import BUFFER_BYTES

pytestmark = pytest.mark.gpu

DEADLINE_S = 120


@pytest.fixture(autouse=True)
def needs_cuda():
    pytest.importorskip("cupy")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def build(device: str, layers: int = 8, width: int = 1024, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, device=device, dtype=dtype) for _ in range(layers)])


class Reader:
    """A process that runs `READER` and answers commands by JSON lines."""

    def __init__(self, handle: Path, device: str = "cuda:0", layers: int = 8, width: int = 1024) -> None:
        command = [sys.executable, __file__, str(handle), device, str(layers), str(width)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, command: str) -> dict:
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the reader ended at {command!r} with {self.process.wait(DEADLINE_S)}"
        return json.loads(line)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)


def reader_main(handle: str, device: str, layers: int, width: int) -> None:
    torch.zeros(1, device=device)
    free = torch.cuda.mem_get_info(device)[0]
    started = time.perf_counter()
    remote = open_remote_memory(handle, timeout_s=DEADLINE_S, device=device)
    attach_ms = (time.perf_counter() - started) * 1e3
    model = build("meta", layers, width)
    for line in sys.stdin:
        command = line.strip()
        answer: dict = {}
        started = time.perf_counter()
        try:
            if command == "attach":
                answer = {"attach_ms": attach_ms}
            elif command == "alias":
                answer = {"version": remote.alias(model)}
            elif command == "pull":
                model = model if next(model.parameters()).device.type != "meta" else build(device, layers, width)
                answer = {"version": remote.pull(model)}
            elif command == "refresh":
                answer = {"version": remote.refresh()}
            elif command == "release":
                remote.release()
            elif command == "values":
                answer = {"values": sorted({float(p.flatten()[i]) for p in model.parameters() for i in (0, -1)})}
            elif command == "memory":
                answer = {"bytes": free - torch.cuda.mem_get_info(device)[0]}
        except Exception as error:  # noqa: BLE001  (the test reads which)
            answer = {"error": f"{type(error).__name__}: {error}"}
        torch.cuda.synchronize()
        print(json.dumps(answer | {"ms": (time.perf_counter() - started) * 1e3}), flush=True)


def fill(model: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)


def test_alias_in_another_process_sees_each_version(tmp_path):
    handle, model = tmp_path / "handle.json", build("cuda:0")
    with WeightExporter.from_model(model, handle) as exporter, Reader(handle) as reader:
        assert json.loads(handle.read_text())["memory"]["kind"] == "cuda"
        fill(model, 1)
        exporter.publish(1)
        assert reader.ask("alias")["version"] == 1
        print(f"attach {reader.ask('attach')['attach_ms']:.1f} ms")
        assert reader.ask("values")["values"] == [1.0]
        fill(model, 2)
        assert exporter.publish(2)
        assert reader.ask("values")["values"] == [1.0], "still leased"
        assert not exporter.publish(3)
        adopted = reader.ask("refresh")
        assert adopted["version"] == 2
        print(f"adopt {adopted['ms']:.3f} ms")
        assert reader.ask("values")["values"] == [2.0]
        assert exporter.publish(3)


def test_pull_on_the_same_device_and_its_bandwidth(tmp_path):
    handle, model = tmp_path / "handle.json", build("cuda:0", layers=128, width=2048)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with WeightExporter.from_model(model, handle) as exporter:
        for version in range(1, 4):
            exporter.publish(version)
        torch.cuda.synchronize()
        started = time.perf_counter()
        exporter.publish(4)
        publish_s = time.perf_counter() - started
        source, destination = (torch.empty(nbytes, dtype=torch.uint8, device="cuda:0") for _ in range(2))
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            started = time.perf_counter()
            destination.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        raw_s = sorted(seconds)[2]
        print(
            f"{nbytes / 1e9:.2f} GB: publish {nbytes / publish_s / 1e9:.0f} GB/s, raw {nbytes / raw_s / 1e9:.0f} GB/s"
        )
        other = build("cuda:0", layers=128, width=2048)
        with open_remote_memory(handle) as remote:
            assert remote.pull(other) == 4
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_exporters_own_process_aliases_its_pointer(tmp_path):
    handle, model, other = tmp_path / "handle.json", build("cuda:0"), build("cuda:0")
    with WeightExporter.from_model(model, handle) as exporter, open_remote_memory(handle) as remote:
        exporter.publish(1)
        remote.alias(other)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_killed_reader_frees_its_slot(tmp_path):
    handle, model = tmp_path / "handle.json", build("cuda:0")
    with WeightExporter.from_model(model, handle) as exporter, Reader(handle) as reader:
        exporter.publish(1)
        reader.ask("alias")
        assert exporter.publish(2) and not exporter.publish(3)
        reader.process.send_signal(signal.SIGKILL)
        reader.process.wait(DEADLINE_S)
        assert exporter.publish(3)


EXPORTER = """
import sys, torch, time
sys.path.insert(0, sys.argv[2])
from test_weights_cuda import build, fill
from async_grpo_ipc import WeightExporter
model = build("cuda:0")
fill(model, 5)
exporter = WeightExporter.from_model(model, sys.argv[1])
exporter.publish(5)
print("published", flush=True)
time.sleep(600)
"""


def test_a_trainer_with_expandable_segments_is_published_all_the_same(tmp_path):
    """Raw allocations are not torch's, so the allocator's setting does not matter."""
    code = EXPORTER.replace("time.sleep(600)", "sys.stdin.read()")
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    handle = tmp_path / "handle.json"
    exporter = subprocess.Popen(
        [sys.executable, "-c", code, str(handle), str(Path(__file__).parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert exporter.stdout.readline().strip() == "published"
        with Reader(handle) as reader:
            assert reader.ask("alias")["version"] == 5
            assert reader.ask("values")["values"] == [5.0]
    finally:
        exporter.kill()
        exporter.wait(DEADLINE_S)


def test_without_peer_access_a_pull_goes_through_pinned_buffers(tmp_path, monkeypatch):
    """Forced, because one GPU has no peer: the chunks go down to the host and up to the same GPU again."""
    monkeypatch.setenv(NO_PEER, "1")
    handle, model = tmp_path / "handle.json", build("cuda:0", layers=32, width=2048)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    assert nbytes > 4 * BUFFER_BYTES, "each buffer is used more than once"
    with WeightExporter.from_model(model, handle) as exporter, Reader(handle, layers=32, width=2048) as reader:
        for version in (1, 2, 3):
            fill(model, version)
            assert exporter.publish(version)
            answer = reader.ask("pull")
            assert answer["version"] == version
            assert reader.ask("values")["values"] == [float(version)]
        print(f"pull through the host {nbytes / answer['ms'] / 1e6:.1f} GB/s")
        assert "on another GPU" in reader.ask("alias")["error"]


def test_a_peer_gpu_pulls(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    handle, model = tmp_path / "handle.json", build("cuda:0")
    with WeightExporter.from_model(model, handle) as exporter, Reader(handle, device="cuda:1") as reader:
        fill(model, 3)
        exporter.publish(1)
        answer = reader.ask("pull")
        assert answer["version"] == 1
        assert reader.ask("values")["values"] == [3.0]
        print(f"peer pull {answer['ms']:.1f} ms")


if __name__ == "__main__":
    reader_main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
