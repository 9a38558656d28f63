"""The scripts for SLURM, with stand-ins for srun, scontrol and Ray: what is started, and how the walltime ends it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from async_grpo.verl_keys import Keys
from async_grpo.verl_keys.steps import Steps
from kit.waiting import until

if TYPE_CHECKING:
    from conftest import SmallJob

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts" / "slurm"
STAND_INS = Path(__file__).parent / "bin"
DEADLINE_S = 240.0

Job = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Start a script as a job of some nodes; what it has started is gone at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def start(script: str, *arguments: str, nodes: int = 1, **env: str) -> subprocess.Popen[str]:
        of_slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": str(nodes)}
        hosts = {"SLURM_JOB_NODELIST": ",".join(f"gpu{number + 2}" for number in range(nodes))}
        paths = {"PATH": f"{STAND_INS}:{os.environ['PATH']}", "NOTES": str(tmp_path / "notes"), "TMPDIR": str(tmp_path)}
        ours = {"PYTHON": str(STAND_INS / "program"), "SHARED_DATA_PATH": "/data", **of_slurm, **hosts, **paths}
        process = subprocess.Popen(
            ["bash", str(SCRIPTS / script), *arguments],
            env={**os.environ, **ours, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(process: subprocess.Popen[str]) -> str:
    """Return all that it printed."""
    output, _ = process.communicate(timeout=DEADLINE_S)
    return output


def notes(tmp_path: Path, name: str = "notes") -> tuple[str, str, list[str]]:
    """Ray's address and nodes, its patience, and the arguments of Python."""
    cluster, patience, *arguments = (tmp_path / name).read_text().split("\0")[:-1]
    return cluster, patience, arguments


@pytest.mark.parametrize("script", ["multinode_mtl.sh", "multinode_math.sh"])
def test_all_nodes_run_one_program_whose_keys_there_are(job: Job, tmp_path: Path, script: str) -> None:
    process = job(
        script, "trainer.total_epochs=1", "--dry-run", nodes=4, SLURM_GPUS_ON_NODE="8", FLASH_ATTENTION_DISABLE="1"
    )
    assert (ended(process), process.returncode) == ("", 0)
    cluster, patience, arguments = notes(tmp_path)
    assert (cluster, patience) == ("gpu2:6379 4", "300")
    assert arguments[0] == "scripts/main_ppo.py"
    assert arguments[-3:] == ["--dry-run", "--stop-grace", "500"]
    keys = Keys.read(arguments[1:-3])
    assert not keys.without_effect
    assert (keys["trainer.nnodes"], keys["trainer.trainer_nodes"]) == (4, None), "it trains on all"
    assert keys["trainer.n_gpus_per_node"] == 8
    assert keys["trainer.total_epochs"] == 1, "what is given replaces what the script has"
    assert keys["actor_rollout_ref.model.override_config.attn_implementation"] == "sdpa"
    assert "/data/math__combined_54.4k.parquet" in keys["data.train_files"]
    Steps.of(keys, ranks=4 * (keys["async.trainer_gpus_per_node"] or 4))


def test_one_node_needs_no_ray_and_the_job_ends_as_its_program(job: Job, tmp_path: Path) -> None:
    process = job("multinode_mtl.sh", ENDS="3")
    ended(process)
    assert process.returncode == 3
    cluster, _, arguments = notes(tmp_path)
    assert cluster == ""
    assert {"trainer.nnodes=1", "trainer.device=cpu"} <= {*arguments}


def test_the_signal_before_the_walltime_reaches_the_launcher_alone(job: Job, tmp_path: Path) -> None:
    process = job("multinode_mtl.sh", nodes=2, ENDS="by-signal")
    until((tmp_path / "notes").exists, deadline_s=DEADLINE_S, process=process, said=lambda: ended(process))
    process.send_signal(signal.SIGUSR1)
    assert "sbatch again continues it" in ended(process)
    assert process.returncode == 0
    assert (tmp_path / "notes.checkpoint").exists()


def test_each_task_is_a_machine_of_the_trainer_and_the_signal_reaches_the_first(job: Job, tmp_path: Path) -> None:
    arguments = ["my_trainer.py", "--accelerate-config", "two.yaml"]
    of_slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "123456", "SLURMD_NODENAME": "gpu2"}
    process = job("train.sh", *arguments, nodes=2, ENDS="by-signal", **of_slurm)
    names = ("notes", "notes.1")
    until(lambda: all((tmp_path / name).exists() for name in names), deadline_s=DEADLINE_S, process=process)
    process.send_signal(signal.SIGUSR1)
    assert "sbatch again continues it" in ended(process)
    assert process.returncode == 0
    assert (tmp_path / "notes.checkpoint").exists() and not (tmp_path / "notes.1.checkpoint").exists()
    for number, name in enumerate(names):
        where = ["--main-process", "10.0.0.2:23456", "--stop-grace", "500", "--machine-rank", str(number)]
        assert notes(tmp_path, name) == ("", "", ["-m", "async_grpo.cli", "train", *arguments, *where])


def test_a_script_that_is_no_job_says_so(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    script = str(SCRIPTS / "multinode_mtl.sh")
    ran = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "SLURM_SUBMIT_DIR: is not set: submit this script with sbatch" in ran.stderr


@pytest.mark.slow
def test_a_job_that_is_submitted_again_continues(job: Job, small_job: SmallJob) -> None:
    """The script of six tasks, on two small ones, on the CPU."""
    process = job("multinode_mtl.sh", *small_job.keys, **small_job.env)
    checkpoint = small_job.output / "checkpoint-10"
    until(checkpoint.is_dir, deadline_s=DEADLINE_S, process=process, said=lambda: ended(process))
    process.send_signal(signal.SIGUSR1)
    assert "stopped" in ended(process)
    again = job("multinode_mtl.sh", *small_job.keys, **small_job.env)
    output = ended(again)
    assert again.returncode == 0, output
    assert "resuming from" in output
    assert (small_job.output / "checkpoint-60").is_dir()
