"""Whole runs whose workers start vLLM servers, which take the weights out of shared memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: `make test-vllm` makes an environment that has it")

from kit.runs import command, ran, read, steps_logged, values_logged
from kit.waiting import until_gone

SETUP = str(Path(__file__).parent / "setups" / "qwen3_1m.py")
STEPS = 8


def server_of(worker: psutil.Process) -> psutil.Process | None:
    found = [child for child in worker.children() if "vllm.entrypoints.openai.api_server" in child.cmdline()]
    return found[0] if found else None


def check(run_dir: Path, steps: int) -> None:
    """The server sampled with the very weights that the trainer has at that version, and no group was lost."""
    assert steps_logged(run_dir) == list(range(1, steps + 1))
    assert read(run_dir / "summary.json")["jobs_quarantined"] == 0
    mismatch = values_logged(run_dir, "async/logprob_mismatch")
    assert mismatch
    assert max(mismatch) < 1e-4, mismatch


def test_a_server_killed_in_the_middle_costs_no_group(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    options = ("-n", "1", "--steps", str(STEPS), "--generator", "vllm-server", "--max-staleness", "0")
    with command("train", SETUP, *options, cwd=tmp_path, TEST_TOKENS="48", OMP_NUM_THREADS="1") as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 2, "two steps")
        worker = run.worker(1)
        server = server_of(worker)
        assert server is not None
        family = [server, *server.children(recursive=True)]
        run.wait_until(lambda: list((run_dir / "queue").glob("*_processing_by_dev1.*")), "a job of worker 1")
        server.kill()
        assert run.wait() == 0, run.output
        assert worker.pid == run.worker(1).pid if worker.is_running() else True
    check(run_dir, STEPS)
    assert "is started again" in (run_dir / "log_worker_1.txt").read_text()
    assert read(run_dir / "summary.json")["worker_restarts"] == 0, "the server was started again, not the worker"
    until_gone(family)


def test_tensor_parallelism_and_an_adapter_that_is_merged_on_the_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    options = ("-n", "1", "--steps", "3", "--generator", "vllm-server", "--max-staleness", "0")
    parallel = ("--set", "vllm_tensor_parallel_size=2")
    ran(
        "train", SETUP, *options, *parallel, cwd=tmp_path, TEST_LORA="1", OMP_NUM_THREADS="1", VLLM_LOGGING_LEVEL="INFO"
    )
    check(run_dir, 3)
    assert "TP1" in (run_dir / "log_worker_1_vllm_server.txt").read_text()
