"""Stages as jobs of SLURM: in a stand-in for its programs, and in the one that submitit has for a cluster."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import submitit
from experiment_yard import ExperimentYard, tree

from async_grpo.errors import RunDirError, UsageError
from async_grpo_experiments.runner import experiment
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.slots import slurm
from async_grpo_experiments.slots.ledger import FAILED, FINISHED, Ledger, Record, read
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule
from async_grpo_experiments.slots.starter import LOST
from kit.waiting import is_gone, until

STAND_IN = Path(__file__).with_name("slurm_stand_in.py")
ON_SLURM = tree(
    algos={"QSharp": {}},
    rounds_of_training=1,
    system={"engine": "slurm", "device": "cpu"},
    slurm={"partition": "short", "qos": "low", "timeout_min": 30, "mem_gb": 2, "cpus": 3},
)
STAGES = 4
pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "ASK_S", 0.05)
    monkeypatch.setattr(slurm, "LOOK_S", 0.01)
    monkeypatch.setattr(submitit.SlurmJob.watcher, "_delay_s", 0.1)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the stand-in's jobs. Those that still run at the end are cancelled."""
    programs, jobs = tmp_path / "programs", tmp_path / "jobs"
    programs.mkdir()
    jobs.mkdir()
    for name in slurm.PROGRAMS:
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} -S {STAND_IN} {name} "$@"\n')
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(jobs))
    yield jobs
    for job in jobs_of(jobs):
        subprocess.run(["scancel", job.name], check=False)


def jobs_of(cluster: Path) -> list[Path]:
    return [path for path in cluster.iterdir() if path.name.isdecimal()]


def test_stages_are_jobs_named_by_their_attempts_and_nothing_is_unpickled(
    tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pickle.load", lambda file: pytest.fail("the runner has unpickled something"))
    yard = ExperimentYard(tmp_path)
    assert yard.run(ON_SLURM, places=None) == 0
    assert len(yard.finished) == len(jobs_of(cluster)) == STAGES
    assert {*yard.job_states().values()} == {"EVAL_COMPLETED"}
    folder = yard.root / experiment.SLURM
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    script = next(cluster.glob("*.sh")).read_text()
    for flag in ("--partition=short", "--qos=low", "--time=30", "--mem=2GB", "--cpus-per-task=3", "--signal=USR2@90"):
        assert f"#SBATCH {flag}\n" in script
    assert "gpus-per-node" not in script
    attempts = {path.stem for path in folder.glob("*.json")}
    names = {line for path in cluster.glob("*.sh") for line in path.read_text().split() if "--job-name" in line}
    assert names == {f"--job-name={attempt}" for attempt in attempts} and len(attempts) == STAGES


def test_a_resume_cancels_the_job_of_a_killed_runner_and_waits_for_its_end(tmp_path: Path, cluster: Path) -> None:
    yard, stage = ExperimentYard(tmp_path), "QSharp_tiny_sums_r1.train"
    yard.fail(stage, "hang")
    code = (
        "from experiment_yard import *; from async_grpo_experiments.slots import slurm; slurm.ASK_S = 0.05; "
        f"ExperimentYard(Path({str(tmp_path)!r})).run({ON_SLURM!r}, places=None)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent)
    try:
        hangs = tmp_path / f"{stage}.hangs"
        pid = int(until(lambda: hangs.exists() and hangs.read_text(), stage))
    finally:
        runner.kill()
        runner.wait()
    os.kill(pid, 0)  # the job goes on
    assert yard.run(ON_SLURM, places=None) == 0
    until(lambda: is_gone(pid), "the end of what the cancelled job had started")
    assert len(yard.finished) == len({*yard.finished}) == STAGES
    assert len(jobs_of(cluster)) == STAGES + 1
    assert not list(yard.root.glob("jobs/*/*.partial-*"))


def run_task(folder: Path, script: str, cluster: str, said: list[str], **more: Any) -> Record:
    def command(place: Place) -> Command:
        return Command(["sh", "-c", script], os.environ, folder / "task.log", f"attempt{len(said)}")

    starter = partial(slurm.SlurmStarter, folder / "submitit", {"timeout_min": 30}, cluster=cluster)
    ledger, task = Ledger(folder / "slots.jsonl"), Task(name="a", command=command, **more)
    return TaskSchedule([task], [Place(name="one")], ledger, say=said.append, open_starter=starter).run()["a"]


def test_a_lost_job_is_started_again_and_has_failed_at_the_third_time(tmp_path: Path, cluster: Path) -> None:
    """The script kills submitit's process, which is its parent, as a node that dies does."""
    once, done = tmp_path / "once", tmp_path / "done"

    def unfinished() -> str:
        return "" if done.exists() else "no manifest"

    script = f"test -e {once} && touch {done} && exit 0; touch {once}; kill -9 $PPID; sleep 60"
    found = run_task(tmp_path, script, "slurm", said := [], unfinished=unfinished)
    assert (found.state, found.lost) == (FINISHED, 1)
    assert any("its process was lost, 1 of 3 times" in one for one in said)
    (tmp_path / "slots.jsonl").unlink()
    done.unlink()
    found = run_task(tmp_path, "kill -9 $PPID; sleep 60", "slurm", said, unfinished=unfinished)
    assert (found.state, found.lost, found.code, found.pid) == (FAILED, 3, LOST, 0)
    assert found.why == "its process was lost, 3 of 3 times"


def test_what_the_manifest_says_counts_and_not_the_state_of_the_job(tmp_path: Path, cluster: Path) -> None:
    script = f"echo x >> {tmp_path}/done; kill -9 $PPID; sleep 60"
    done = lambda: "" if (tmp_path / "done").exists() else "no manifest"  # noqa: E731
    assert run_task(tmp_path, script, "slurm", [], unfinished=done).state == FINISHED
    (tmp_path / "slots.jsonl").unlink()
    found = run_task(tmp_path, "true", "slurm", [], unfinished=lambda: "no manifest")
    assert (found.state, found.why) == (FAILED, "no manifest")


def test_the_exit_code_and_the_last_words_of_a_job_are_those_of_its_command(tmp_path: Path, cluster: Path) -> None:
    found = run_task(tmp_path, "echo error: no luck; exit 3", "slurm", [])
    assert (found.state, found.code, found.why) == (FAILED, 3, "exit code 3: error: no luck")


def test_a_job_whose_log_says_nothing_new_is_cancelled_and_has_failed(tmp_path: Path, cluster: Path) -> None:
    found = run_task(tmp_path, "echo hello; sleep 600", "slurm", said := [], silence_s=0.1)
    assert (found.state, found.why, found.lost) == (FAILED, "its log has said nothing for 0.1 s", 0)
    assert said.count("cancelling a: its log has said nothing for 0.1 s") == 1


def run_interrupted(folder: Path, interrupt: Callable[[Any], object], cluster: str, **parameters: object) -> Path:
    """A command that ends with success at its second start; the first one ends by SIGTERM alone, and says so."""
    starts, asked = folder / "starts", folder / "asked"
    script = (
        f"test -e {starts} && echo x >> {starts} && exit 0; trap 'touch {asked}; exit 1' TERM; echo x >> {starts}; "
        "while :; do sleep 0.02; done"
    )
    command, sent = Command(["sh", "-c", script], os.environ, folder / "task.log", "attempt"), list[object]()

    def opened(**surroundings: Any) -> slurm.SlurmStarter:
        surroundings["look"] = partial(look_and_interrupt, surroundings["look"])
        opened.starter = slurm.SlurmStarter(folder / "submitit", parameters, cluster=cluster, **surroundings)
        return opened.starter

    def look_and_interrupt(look: Callable[[], None]) -> None:
        look()
        if starts.exists() and not sent:
            sent.append(interrupt(opened.starter._jobs["a"]))

    ledger, task = Ledger(folder / "slots.jsonl"), Task(name="a", command=lambda place: command)
    schedule = TaskSchedule([task], [Place(name="one")], ledger, say=lambda text: None, open_starter=opened)
    assert schedule.run()["a"].state == FINISHED
    assert asked.exists()
    return starts


def test_before_its_time_limit_a_command_is_ended_and_queued_again(tmp_path: Path, cluster: Path) -> None:
    starts = run_interrupted(tmp_path, lambda job: job._interrupt(timeout=True), "slurm", timeout_min=60)
    assert len(starts.read_text().split()) == 2


def test_a_time_limit_of_submitits_own_cluster_ends_a_command_and_starts_it_again(tmp_path: Path) -> None:
    starts = run_interrupted(tmp_path, id, "local", local_timeout_min=36 / 60)  # it signals 30 s before
    assert len(starts.read_text().split()) == 2


def test_a_stop_cancels_the_jobs_and_waits_for_them(tmp_path: Path, cluster: Path) -> None:
    pid_file = tmp_path / "pid"
    stops: list[int] = []

    def look() -> None:
        if pid_file.exists() and pid_file.read_text() and not stops:
            stops.append(1)
            schedule.stop()

    command = Command(["sh", "-c", f"echo $$ > {pid_file}; sleep 600"], os.environ, tmp_path / "task.log", "attempt")
    starter = partial(slurm.SlurmStarter, tmp_path / "submitit", {"timeout_min": 30})
    task, ledger = Task(name="a", command=lambda place: command), Ledger(tmp_path / "slots.jsonl")
    schedule = TaskSchedule([task], [Place(name="one")], ledger, say=print, look=look, open_starter=starter)
    schedule.run()
    assert read(tmp_path / "slots.jsonl")["a"].state == "stopped"

    def gone() -> bool:
        with suppress(ProcessLookupError):
            os.kill(int(pid_file.read_text()), signal.SIGCONT)
            return False
        return True

    until(gone, "the end of the job's process")


def test_a_job_that_slurm_does_not_take_has_failed_with_what_it_says(tmp_path: Path, cluster: Path) -> None:
    (tmp_path / "programs" / "sbatch").write_text("#!/bin/sh\necho invalid partition >&2; exit 1\n")
    found = run_task(tmp_path, "true", "slurm", [])
    assert found.state == FAILED and "SLURM does not take the job: invalid partition" in found.why


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, cluster: Path) -> None:
    folder = tmp_path / "submitit"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(RunDirError):
        slurm.SlurmStarter(folder, {}, say=print, look=lambda: None)


def test_without_slurms_programs_it_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="There is no sbatch here"):
        ExperimentYard(tmp_path).run(ON_SLURM, places=None)
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"slurm": {"gpus": 3}}, "slurm.gpus 3 is not what a stage uses"),
        ({"slurm": {"timeout_min": 0}}, "slurm.timeout_min must be at least 1"),
        ({"scheduling": {"deadline_s": 9.0}}, "set slurm.timeout_min"),
        ({"slurm": {"partitions": "x"}}, "the nearest is 'partition'"),
    ],
)
def test_what_slurm_cannot_do_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        checked({**ON_SLURM, **keys})
