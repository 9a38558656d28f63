"""The scripts on a real SLURM of one machine, where its programs are: Debian's slurm-wlm and munge, as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kit.runs import SETUP, read, steps_logged
from kit.several_ranks import EXAMPLES
from kit.waiting import until

if TYPE_CHECKING:
    from conftest import SmallJob

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
DEADLINE_S = 900.0  # for a step of the test; on a busy machine loading alone takes minutes
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, PROGRAMS)),
        reason="needs root, and SLURM: apt-get install slurm-wlm munge",
    ),
]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start munged, slurmctld and slurmd for this test alone."""
    folder, host = tmp_path / "slurm", socket.gethostname().partition(".")[0]
    folder.mkdir(mode=0o755)
    (folder / "munge.key-file").write_bytes(os.urandom(128))
    (folder / "munge.key-file").chmod(0o400)
    text = CONFIGURATION.format(host=host, folder=folder, cpus=os.cpu_count(), ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    munged = ["munged", "--force", "--foreground", *(f"--{name}={folder}/munge.{name}" for name in files)]
    daemons = [munged, ["slurmctld", "-D"], ["slurmd", "-D"]]
    processes = []
    try:
        for command in daemons:
            with (folder / f"{command[0]}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(0.5)  # each connects to the one before; what is too early is tried again
        until(
            lambda: (
                "idle" in subprocess.run(["sinfo", "--noheader"], check=False, capture_output=True, text=True).stdout
            ),
            deadline_s=DEADLINE_S,
            said=lambda: "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log")),
        )
        yield folder
    finally:
        subprocess.run(["scancel", "--me"], check=False, timeout=60)
        until(lambda: not jobs(), "the end of the jobs", deadline_s=DEADLINE_S)
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def jobs() -> str:
    return subprocess.run(["squeue", "--noheader"], check=False, capture_output=True, text=True).stdout


def submitted(script: str, log: Path, *arguments: str, tasks: int = 1, **env: str) -> str:
    """The number of the job."""
    options = ["--nodes=1", f"--ntasks={tasks}", f"--ntasks-per-node={tasks}", "--gres=none", "--time=30"]
    command = ["sbatch", "--parsable", *options, f"--output={log}", f"scripts/slurm/{script}", *arguments]
    ran = subprocess.run(command, cwd=ROOT, env={**os.environ, **env}, check=True, capture_output=True, text=True)
    return ran.stdout.strip()


def state_of(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], check=True, capture_output=True, text=True).stdout
    return shown.partition("JobState=")[2].split()[0]


def near_its_walltime(job: str, log: Path) -> None:
    """Signal a job as --signal=B:USR1@600 does, and wait for its end."""
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    until(lambda: state_of(job) not in ("RUNNING", "COMPLETING"), deadline_s=DEADLINE_S, said=log.read_text)
    assert state_of(job) == "COMPLETED", log.read_text()
    assert "sbatch again continues it" in log.read_text()


def test_a_job_writes_a_checkpoint_at_the_signal_and_a_second_one_continues(slurm: Path, small_job: SmallJob) -> None:
    first, again = slurm / "first.out", slurm / "again.out"
    job = submitted("multinode_mtl.sh", first, *small_job.keys, **small_job.env)
    checkpoint = small_job.output / "checkpoint-10"
    until(checkpoint.is_dir, "a checkpoint", deadline_s=DEADLINE_S, said=lambda: state_of(job) + first.read_text())
    near_its_walltime(job, first)
    job = submitted("multinode_mtl.sh", again, *small_job.keys, **small_job.env)
    states = ("PENDING", "RUNNING", "COMPLETING")
    until(lambda: state_of(job) not in states, deadline_s=DEADLINE_S, said=again.read_text)
    assert state_of(job) == "COMPLETED", again.read_text()
    assert "resuming from" in again.read_text()
    assert (small_job.output / "checkpoint-60").is_dir()


def test_two_tasks_are_two_machines_of_a_trainer_and_end_at_the_signal(slurm: Path, tmp_path: Path) -> None:
    log, run_dir, config = slurm / "train.out", tmp_path / "run", tmp_path / "two.yaml"
    config.write_text((EXAMPLES / "ddp.yaml").read_text().replace("num_machines: 1", "num_machines: 2"))
    arguments = (str(SETUP), "-n", "1", "--accelerate-config", str(config), "--run-dir", str(run_dir))
    env = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    more = ("--steps", "100000", "--set", f"output_dir={tmp_path / 'out'}")
    job = submitted("train.sh", log, *arguments, *more, tasks=2, **env)
    until(lambda: steps_logged(run_dir), "a step", deadline_s=DEADLINE_S, said=lambda: state_of(job) + log.read_text())
    near_its_walltime(job, log)
    assert read(run_dir / "run.json")["state"] == "stopped"
    assert "machine 1 of 2: asking 127.0.0.1:" in log.read_text()
    assert (tmp_path / "run-machine1").is_dir()
