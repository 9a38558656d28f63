"""Plain TRL starts a real vLLM server, which answers; without a GPU TRL cannot send it weights, and the run ends."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from kit.runs import command
from kit.waiting import until_gone

pytestmark = pytest.mark.slow
SETUP = str(Path(__file__).parent / "setups" / "qwen3_1m.py")
OPTIONS = ("--device", "cpu", "--generator", "vllm-server", "--set", "vllm_mode=server")


def test_the_server_of_plain_trl_answers_and_ends_with_the_run(tmp_path: Path) -> None:
    log = tmp_path / "run" / "log_vllm_server.txt"
    family: list[psutil.Process] = []
    with command("train", SETUP, "--run-dir", "run", *OPTIONS, cwd=tmp_path, TEST_USE_VLLM="1") as run:
        run.wait_until(lambda: log.exists() and "GET /health" in log.read_text(), "an answer of the server")
        family += run.children()
        assert run.wait() == 2, run.output
    assert "TRL cannot send weights to a vLLM server here" in run.output
    assert not (tmp_path / "run" / "vllm_server").exists()
    until_gone(family)
