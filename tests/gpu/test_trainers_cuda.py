"""Trainers that need GPUs: Unsloth, a 4-bit base, several GPUs. None of this has run yet (docs/gpu.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_runs import ROOT, mismatch

RECIPE = ROOT / "src" / "app" / "trainer_setup_gsmk.py"
SHAPES = ROOT / "benchmarks" / "setups" / "qwen3_shape.py"
QLORA = Path(__file__).parent / "setups" / "qlora.py"
LIMIT_S = 500

pytestmark = pytest.mark.gpu


def run(cwd: Path, *arguments: str, **env: str) -> None:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]), **env},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.skipif(importlib.util.find_spec("unsloth") is None, reason="unsloth is not installed")
@pytest.mark.parametrize("fast_inference", ["1", "0"])
def test_unsloth_trains_and_a_worker_generates(fast_inference: str, tmp_path: Path) -> None:
    """1: the worker generates with the vLLM inside Unsloth's model; 0: with transformers or an engine of ours."""
    if fast_inference == "1":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    model = tmp_path / "model"
    run(tmp_path, str(SHAPES), str(model), QWEN3_SHAPE="0.6B")
    (tmp_path / "data").mkdir()
    row = json.dumps({"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"})
    for split in ("train", "test"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(f"{row}\n" * 64)
    arguments = ["-m", "async_grpo.cli", "train", str(RECIPE), "--steps", "2", "--num-workers", "1"]
    surroundings = {"MODEL_PATH": str(model), "GSM8K_PATH": str(tmp_path / "data"), "FAST_INFERENCE": fast_inference}
    run(tmp_path, *arguments, "--max-staleness", "0", **surroundings)
    assert json.loads((tmp_path / "worker" / "summary.json").read_text())["steps"] == 2
    assert max(mismatch(tmp_path)) < 0.05  # bf16


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_qlora_trains_and_a_worker_generates(tmp_path: Path) -> None:
    """Both load the base in 4 bits; a worker whose base were another would refuse the weights."""
    model = tmp_path / "model"
    run(tmp_path, str(SHAPES), str(model), QWEN3_SHAPE="tiny")
    arguments = ["-m", "async_grpo.cli", "train", str(QLORA), "--num-workers", "1", "--generator", "hf"]
    run(tmp_path, *arguments, "--max-staleness", "0", MODEL_PATH=str(model))
    assert json.loads((tmp_path / "worker" / "summary.json").read_text())["steps"] == 3
    assert max(mismatch(tmp_path)) < 0.05  # bf16


@pytest.mark.skipif(torch.cuda.device_count() < 3, reason="needs two GPUs for the trainer and one for a worker")
@pytest.mark.parametrize("config", ["ddp.yaml", "fsdp2.yaml"])
def test_a_trainer_on_two_gpus(config: str, tmp_path: Path) -> None:
    accelerate = ["--accelerate-config", str(ROOT / "examples" / "accelerate" / config)]
    setup = ["-m", "async_grpo.cli", "train", str(SHAPES), "--steps", "4", "--max-staleness", "0"]
    run(tmp_path, *setup, *accelerate, "--worker-device-ids", "2", QWEN3_SHAPE="tiny", COMPLETION="16")
    differences = mismatch(tmp_path)
    assert len(differences) == 4
    assert max(differences) < 0.05  # bf16
