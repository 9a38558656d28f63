"""The scripts on a real SLURM of one machine, where its programs are: Debian's slurm-wlm and munge, as root."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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


def submitted(small_job: SmallJob, log: Path) -> str:
    """The number of the job."""
    options = ["--parsable", "--nodes=1", "--gres=none", "--time=30", f"--output={log}"]
    command = ["sbatch", *options, "scripts/slurm/multinode_mtl.sh", *small_job.keys]
    env = {**os.environ, **small_job.env}
    return subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, text=True).stdout.strip()


def state_of(job: str) -> str:
    shown = subprocess.run(["scontrol", "show", "job", job], check=True, capture_output=True, text=True).stdout
    return shown.partition("JobState=")[2].split()[0]


def test_a_job_writes_a_checkpoint_at_the_signal_and_a_second_one_continues(slurm: Path, small_job: SmallJob) -> None:
    first, again = slurm / "first.out", slurm / "again.out"
    job = submitted(small_job, first)
    checkpoint = small_job.output / "checkpoint-10"
    until(checkpoint.is_dir, "a checkpoint", deadline_s=DEADLINE_S, said=lambda: state_of(job) + first.read_text())
    # as --signal=B:USR1@600 does near the walltime
    subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    until(lambda: state_of(job) not in ("RUNNING", "COMPLETING"), deadline_s=DEADLINE_S, said=first.read_text)
    assert state_of(job) == "COMPLETED", first.read_text()
    assert "sbatch again continues it" in first.read_text()
    job = submitted(small_job, again)
    states = ("PENDING", "RUNNING", "COMPLETING")
    until(lambda: state_of(job) not in states, deadline_s=DEADLINE_S, said=again.read_text)
    assert state_of(job) == "COMPLETED", again.read_text()
    assert "resuming from" in again.read_text()
    assert (small_job.output / "checkpoint-60").is_dir()
