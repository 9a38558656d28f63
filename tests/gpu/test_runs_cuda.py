"""A whole run on one GPU: its server is killed in the middle and resumed, and the run's files prove that all is well.

QWEN3_SHAPE is the model's shape (benchmarks/setups/qwen3_shape.py); with GPU_TESTS_DEVICE=cpu the run is on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from on_device import ON_CPU, need_device

ROOT = Path(__file__).parents[2]
SETUP = ROOT / "benchmarks" / "setups" / "qwen3_shape.py"
STEPS = 6
PART_S = 180.0  # for each of the two starts
DEVICE_ID = "cpu" if ON_CPU else "0"

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device() -> None:
    need_device()


def cli(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    env = {
        "QWEN3_SHAPE": "tiny" if ON_CPU else "0.6B",
        "COMPLETION": "8" if ON_CPU else "256",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "STEPS": str(STEPS),
        "SAVE_STEPS": "2",
    }
    output = (folder / "output.txt").open("ab")
    command = [sys.executable, "-m", "async_grpo.cli", *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)


def train(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    devices = ["--master-device-id", DEVICE_ID, "--worker-device-ids", f"{DEVICE_ID},{DEVICE_ID}"]
    return cli(folder, "train", str(SETUP), *devices, "--generator", "hf", *more)


def said(folder: Path) -> str:
    logs = [folder / "output.txt", *sorted((folder / "worker").glob("log_*.txt"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def kill_the_server(run: subprocess.Popen[bytes], folder: Path) -> None:
    """Once there is a checkpoint, and workers are generating for later steps."""
    deadline = time.monotonic() + PART_S
    while not (folder / "outputs" / "qwen3_shape" / "checkpoint-2" / "rollout_state.json").exists():
        assert run.poll() is None and time.monotonic() < deadline, said(folder)
        time.sleep(0.1)
    note = json.loads((folder / "worker" / "server.lock").read_text())
    os.kill(note["pid"], signal.SIGKILL)


def test_a_server_killed_while_workers_generate_is_resumed_without_a_loss(tmp_path: Path) -> None:
    run = train(tmp_path)
    try:
        kill_the_server(run, tmp_path)
        assert run.wait(PART_S) != 0, "the launcher says that its server was killed"
        run = train(tmp_path, "--resume")
        assert run.wait(PART_S) == 0, said(tmp_path)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    summary = json.loads((tmp_path / "worker" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", STEPS)
    audit = cli(tmp_path, "audit", "worker")
    assert audit.wait(60) == 0, said(tmp_path)
    lost = [line for line in said(tmp_path).splitlines() if "weights were lost" in line]
    print(f"handed back after the server's death: {lost}")
