"""`examples/feed_vllm.py` with a real server of two processes, that `VLLMServerProcess` starts, and starts again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import qwen3_1m
import requests

from async_grpo.serving.vllm_server import ServerPlan, VLLMServerProcess
from kit.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "feed_vllm.py"
DEADLINE_S = 300


def feed(model: Path, url: str) -> list[str]:
    """What the server says after each version."""
    command = [sys.executable, str(EXAMPLE), str(model), url]
    done = subprocess.run(command, cwd=model.parent, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return [line.rpartition(" says ")[2] for line in done.stdout.splitlines() if line.startswith("version ")]


def test_a_server_with_tensor_parallelism_is_fed_and_comes_back(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", qwen3_1m.build_tokenizer()
    qwen3_1m.build_model(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    arguments = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "64")
    plan = ServerPlan(model=str(model), port=8100, log=tmp_path / "log", tensor_parallel_size=2, arguments=arguments)
    with VLLMServerProcess(plan) as server:
        server.wait_ready(DEADLINE_S)
        by_a_page = {"Origin": "http://evil.example"}
        answer = requests.post(f"{server.base_url}/reset_prefix_cache", headers=by_a_page, timeout=DEADLINE_S)
        assert answer.status_code == 403, "vLLM answers every page of the web"
        first = feed(model, server.base_url)
        assert len(first) == 5
        assert len(set(first)) > 1, "no update changed anything"
        os.kill(server.pid, signal.SIGKILL)
        until(lambda: not server.running, "the end of the server")
        server.restart()
        server.wait_ready(DEADLINE_S)
        assert feed(model, server.base_url) == first, "the same weights say the same"
    assert not server.running
