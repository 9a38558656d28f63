"""A whole run on one GPU: its server is killed in the middle and resumed, and the run's files prove that all is well.

QWEN3_SHAPE is the model's shape (benchmarks/setups/qwen3_shape.py); with GPU_TESTS_DEVICE=cpu the run is on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from gpu_runs import DEVICES, ROOT, cli, expect_end, expect_finished, said
from on_device import ON_CPU, need_device

from kit.waiting import until

SETUP = ROOT / "benchmarks" / "setups" / "qwen3_shape.py"
STEPS = 6
PART_S = 180.0  # for each of the two starts

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device() -> None:
    need_device()


def train(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    shape = {"QWEN3_SHAPE": "tiny", "COMPLETION": "8"} if ON_CPU else {"QWEN3_SHAPE": "0.6B", "COMPLETION": "64"}
    env = {name: os.environ.get(name, value) for name, value in shape.items()}
    env |= {"STEPS": str(STEPS), "SAVE_STEPS": "2"}
    return cli(folder, "train", str(SETUP), *DEVICES, "--generator", "hf", *more, **env)


def kill_the_server(run: subprocess.Popen[bytes], folder: Path) -> None:
    """Once there is a checkpoint, and workers are generating for later steps."""
    state = folder / "outputs" / "qwen3_shape" / "checkpoint-2" / "rollout_state.json"
    until(state.exists, "a checkpoint", deadline_s=PART_S, process=run, said=lambda: said(folder))
    note = json.loads((folder / "worker" / "server.lock").read_text())
    os.kill(note["pid"], signal.SIGKILL)


def test_a_server_killed_while_workers_generate_is_resumed_without_a_loss(tmp_path: Path) -> None:
    run = train(tmp_path)
    try:
        kill_the_server(run, tmp_path)
        assert run.wait(PART_S) != 0, "the launcher says that its server was killed"
        run = train(tmp_path, "--resume")
        expect_end(run, tmp_path, PART_S)
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)
    expect_finished(tmp_path, STEPS)
    lost = [line for line in said(tmp_path).splitlines() if "weights were lost" in line]
    print(f"handed back after the server's death: {lost}")
