"""Whole runs with vLLM on the workers, and with servers that the workers start and feed out of shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kit import runs
from kit.runs import ROOT, command, ran, read, steps_logged, values_logged
from kit.waiting import until_gone

SETUP = str(Path(__file__).parent / "setups" / "qwen3_1m.py")
STEPS = 20


def test_the_part_of_the_gpu_check_without_a_gpu(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    check = [str(ROOT / "scripts" / "gpu_check.sh"), "vllm", "engine", "--dry-run", "--report", str(report)]
    ended = subprocess.run(check, env={**os.environ, "PYTHON": sys.executable}, timeout=560, check=False)
    assert ended.returncode == 0 and "Left out" not in report.read_text(), report.read_text()
    assert "vLLM in our worker" in report.read_text(), "tokens a second"
    assert "test_adapters_of_two_versions_are_used_side_by_side" in report.read_text(), "the engine's tests"


def test_twenty_steps_with_a_worker_killed_in_the_middle(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    options = ("-n", "2", "--steps", str(STEPS), "--generator", "vllm")
    with command("train", SETUP, *options, cwd=tmp_path, TEST_TOKENS="48", OMP_NUM_THREADS="1") as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 5, "five steps")
        run.wait_until(lambda: list((run_dir / "queue").glob("*_processing_by_dev1.*")), "a job of worker 1")
        run.worker(1).kill()
        assert run.wait() == 0, run.output
    assert steps_logged(run_dir) == list(range(1, STEPS + 1))
    assert read(run_dir / "summary.json")["staleness_max"] <= 4
    mismatch = values_logged(run_dir, "async/logprob_mismatch")
    assert mismatch
    assert max(mismatch) < 1e-4, "the sampler's log-probabilities are the trainer's at the same version"
    assert "OK: all" in ran("audit", str(run_dir), cwd=tmp_path)


def test_use_vllm_in_the_file_means_vllm_on_the_workers_and_adapters_in_flight(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    surroundings = {"TEST_USE_VLLM": "1", "TEST_LORA": "1", "OMP_NUM_THREADS": "1", "TEST_TOKENS": "48"}
    options = ("-n", "1", "--steps", "6", "--in-flight-update", "on")
    ran("train", SETUP, *options, cwd=tmp_path, **surroundings)
    assert steps_logged(run_dir) == list(range(1, 7))
    from async_grpo.queue.codec import decode_group

    groups = [decode_group(path.read_bytes()) for path in (run_dir / "done").rglob("*.safetensors")]
    assert len(groups) >= 6 * 4  # more where groups were finished that the last step did not use
    assert all(group.token_versions is not None for group in groups)
    mismatch = values_logged(run_dir, "async/logprob_mismatch")
    assert not mismatch or max(mismatch) < 1e-4


def test_deterministic_runs_are_equal_with_one_and_two_workers(tmp_path: Path) -> None:
    weights = []
    for workers in ("1", "2"):
        folder = tmp_path / workers
        folder.mkdir()
        options = ("-n", workers, "--steps", "4", "--generator", "vllm", "--deterministic")
        ran("train", SETUP, *options, cwd=folder, TEST_SAVE="1")
        weights.append((folder / "checkpoints" / "checkpoint-4" / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


# --- Servers of the workers --------------------------------------------------------------------------------------


def server_of(worker: psutil.Process) -> psutil.Process | None:
    found = [child for child in worker.children() if "vllm.entrypoints.openai.api_server" in child.cmdline()]
    return found[0] if found else None


def test_a_server_of_two_processes_killed_in_the_middle_costs_no_group(tmp_path: Path) -> None:
    """With tensor parallelism, and an adapter that is merged on the way."""
    run_dir = tmp_path / "worker"
    options = ("-n", "1", "--steps", "6", "--generator", "vllm-server", "--max-staleness", "0")
    env = {"TEST_LORA": "1", "TEST_TOKENS": "48", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with command("train", SETUP, *options, "--set", "vllm_tensor_parallel_size=2", cwd=tmp_path, **env) as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 2, "two steps")
        server = server_of(run.worker(1))
        assert server is not None
        family = [server, *server.children(recursive=True)]
        run.wait_until(lambda: list((run_dir / "queue").glob("*_processing_by_dev1.*")), "a job of worker 1")
        server.kill()
        assert run.wait() == 0, run.output
    assert steps_logged(run_dir) == list(range(1, 7))
    assert "TP1" in (run_dir / "log_worker_1_vllm_server.txt").read_text()
    assert "is started again" in (run_dir / "log_worker_1.txt").read_text()
    summary = read(run_dir / "summary.json")
    assert (summary["jobs_quarantined"], summary["worker_restarts"]) == (0, 0), "the server died, not the worker"
    mismatch = values_logged(run_dir, "async/logprob_mismatch")
    assert mismatch and max(mismatch) < 1e-4, "it sampled with the very weights that the trainer has at that version"
    until_gone(family)


# --- The demo recipe on two seeds at once, each with a vLLM server of its own, of which one is killed in the middle

DEMO = str(Path(__file__).parent / "setups" / "demo.py")
OPTIONS = ("--num-instances", "2", "-n", "1", "--generator", "vllm-server", "--steps", "12", "--eval-every", "6")


def server_in(family: list[psutil.Process], run: Path) -> psutil.Process:
    """The vLLM server of a run; its own children come after it."""
    for process in family:
        with suppress(psutil.NoSuchProcess):
            command_line = " ".join(process.cmdline())
            if "api_server" in command_line and str(run) in command_line:
                return process
    raise AssertionError(f"no server of {run}")


@pytest.mark.slow
def test_two_servers_in_a_sweep_of_which_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "DEADLINE_S", 1200.0)  # two servers load on the cores of one
    dirs = [tmp_path / "outputs" / f"trl_demo_instance{index}_seed{index + 1}" / "run" for index in range(2)]
    with command("sweep", DEMO, "--seeds", "1,2", *OPTIONS, cwd=tmp_path, OMP_NUM_THREADS="1") as sweep:
        sweep.wait_until(lambda: len(steps_logged(dirs[0])) >= 2, "two steps of the first run")
        family = sweep.children()
        server_in(family, dirs[0]).kill()
        assert sweep.wait() == 0, sweep.output
    assert "n = 2 of 2 seeds (1, 2)." in sweep.output
    for run in dirs:
        assert steps_logged(run) == list(range(1, 13))
        summary = read(run / "summary.json")
        assert (summary["jobs_quarantined"], summary["worker_restarts"]) == (0, 0)
        ran("audit", str(run), "--json", cwd=tmp_path)
    assert "is started again" in (dirs[0] / "log_worker_1.txt").read_text()
    assert "is started again" not in (dirs[1] / "log_worker_1.txt").read_text()
    report = json.loads((tmp_path / "outputs" / "sweep_demo" / "report.json").read_text())
    assert {row["step"]: row["n"] for row in report["evaluations"]["success_rate"]} == {0: 2, 6: 2, 12: 2}
    links = sorted((tmp_path / "logs" / "parallel_training").glob("vllm_instance*"))
    assert [link.resolve().parent for link in links] == dirs
    until_gone(family)
