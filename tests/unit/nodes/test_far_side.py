"""The far side without its workers: jobs wait for their weights, groups and failures are told, nothing is left."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.launch.supervisor import Child
from async_grpo.nodes import leftovers
from async_grpo.nodes import node as far
from async_grpo.nodes.node import Exchanged, SentJob, _RunHere
from async_grpo.nodes.tree import packed
from async_grpo.queue import WorkerQueue
from async_grpo.queue.codec import decode_group, encode_job
from async_grpo.rundir import folders
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RUNNING, RunState
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.rundir.shape import as_json
from async_grpo.setup.process import path_to_us
from async_grpo.telemetry.activity import GENERATING, LOADING, SCORING, Activity
from kit.groups import RUN, make_group, make_job
from kit.waiting import until


class FakeWeights:
    """What the node's workers can see."""

    published: int | None = None

    def receive(self, about: dict[str, Any], data: bytes) -> dict[str, Any]:
        self.published = about["version"]
        return {"published": self.published, "why": "", "busy": False}

    def close(self) -> None:
        pass


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the gate would send; the one worker is a program that waits."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(far, "_weights_at", lambda handle, workers: FakeWeights())
    monkeypatch.setattr(far, "POLL_S", 0.1)
    the_worker_is(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(far, "LOOK_S", 0.02)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "setup.py").write_text("def get_trainer(): ...\n")
    (tmp_path / "local").mkdir()
    state = RunState(run_id=RUN, state=RUNNING, started="", plan=RunPlan(config=tmp_path / "project" / "setup.py"))
    return {
        "state": json.dumps(as_json(state)),
        "number": 8,
        "tree": packed(tmp_path / "project" / "setup.py"),
        "devices": ["cpu"],
        "threads": "1",
        "node_dir": str(tmp_path / "local"),
        "folder": str(tmp_path),
    }


def the_worker_is(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    def child(plan: RunPlan, run: Any, number: int, needed: Callable[[], bool], env: dict[str, str]) -> Child:
        command = [sys.executable, "-S", "-c", program]
        return Child(name=f"worker {number}", command=command, env=env, log=run.root / "log.txt", grace_s=0.3)

    monkeypatch.setattr(far, "worker_child", child)


@contextmanager
def begun(order: dict[str, Any]) -> Iterator[_RunHere]:
    node = _RunHere(order)
    try:
        yield node
    finally:
        node.end(finished=False)


@pytest.fixture
def here(order: dict[str, Any]) -> Iterator[_RunHere]:
    with begun(order) as node:
        yield node


def sent(seq: int, *, version: int = 0, attempt: int = 0) -> SentJob:
    return SentJob(version, attempt, encode_job(make_job(seq)))


def told(node: _RunHere, enough: Callable[[Exchanged], object]) -> Exchanged:
    answers: list[Exchanged] = []

    def asked() -> Exchanged | None:
        answers.append(node.exchange([], b""))
        return answers[-1] if enough(answers[-1]) else None

    return until(asked, "the answer", said=lambda: str(vars(answers[-1])))


def test_a_job_waits_for_its_weights(here: _RunHere) -> None:
    with closing(WorkerQueue.open(here._run.root, 1, "cpu")) as worker:
        here.exchange([sent(1, version=3), sent(2, version=4)], b"")
        assert worker.pending() == 0
        here.receive({"version": 3}, b"")
        assert [claim.job.seq for claim in worker.claim(5)] == [1]
        here.receive({"version": 4}, b"")
        assert [claim.job.seq for claim in worker.claim(5)] == [2]
        assert told(here, lambda answer: answer.version).version == 4


def test_a_worker_that_loads_is_none_to_the_server(here: _RunHere) -> None:
    """Its lock is there from its start, but a job that came now would keep the trainer waiting."""
    activity = Activity()
    with closing(WorkerQueue.open(here._run.root, 1, "cpu")) as worker:
        assert here.exchange([], b"").workers == 0
        activity.publish(here._run.root, worker.name, device="cpu", run_id=RUN, state=LOADING, stall_after_s=60)
        assert here.exchange([], b"").workers == 0
        activity.waits("jobs")
        assert here.exchange([], b"").workers == 1
    assert here.exchange([], b"").workers == 0, "it is gone"


def test_groups_that_get_their_rewards_are_told_at_once(here: _RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node has room for other jobs then, though it has nothing to hand back."""
    monkeypatch.setattr(far, "POLL_S", 600.0)
    activity = Activity()
    with closing(WorkerQueue.open(here._run.root, 1, "cpu")) as worker:
        activity.publish(here._run.root, worker.name, device="cpu", run_id=RUN, state=GENERATING, stall_after_s=60)
        here._ready_workers()
        activity.has_jobs([1, 2], GENERATING)
        activity.has_jobs([2], SCORING)
        activity.doing(SCORING)
        assert here.exchange([], b"").scored == 1


def test_a_group_and_a_failure_are_told_and_the_attempt_is_that_of_the_server(here: _RunHere) -> None:
    here.receive({"version": 0}, b"")
    here.exchange([sent(1, attempt=2), sent(2)], b"")
    with closing(WorkerQueue.open(here._run.root, 1, "cpu")) as worker:
        first, second = worker.claim(1) + worker.claim(1)
        assert (first.job.seq, first.attempt) == (1, 2) or (second.job.seq, second.attempt) == (1, 2)
        for claim in (first, second):
            if claim.job.seq == 1:
                worker.fail(claim, "ValueError: poison")
            else:
                worker.complete(claim, make_group(claim.job, attempt=claim.attempt))
        groups: dict[int, bytes] = {}
        failures: dict[int, str] = {}

        def both(answer: Exchanged) -> bool:
            groups.update(answer.groups)
            failures.update(answer.failures)
            return len(groups) == 1 and len(failures) == 1

        told(here, both)
    assert decode_group(groups[2]).job == make_job(2)
    assert "ValueError: poison" in failures[1]


def test_a_dead_worker_is_a_failure_and_the_job_may_come_again(here: _RunHere) -> None:
    here.receive({"version": 0}, b"")
    for attempt in range(2):
        here.exchange([sent(1, attempt=attempt)], b"")
        worker = WorkerQueue.open(here._run.root, 1, "cpu")
        (claim,) = worker.claim(1)
        assert claim.attempt == attempt
        worker._lock.release()  # as the kernel does when it dies
        answer = told(here, lambda answer: answer.failures)
        assert answer.failures == [(1, "Worker dev1 died while it had this job.")]


def test_lines_of_the_trainers_state_arrive(here: _RunHere) -> None:
    here.exchange([], b'{"begins": 0}\n{"step": 1, "state": {}}\n')
    assert here._run.trainer_states.read_text() == '{"begins": 0}\n{"step": 1, "state": {}}\n'


def test_a_newer_exchange_ends_one_that_waits(here: _RunHere, monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr(far, "POLL_S", 300.0)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(here.exchange, [], b"")
        while here._turn == 0:
            time.sleep(0.001)
        newer = ThreadPoolExecutor(1)
        newer.submit(here.exchange, [], b"")
        assert waiting.result(30).groups == []
        here.end(finished=False)  # ends the newer one
        newer.shutdown()


@pytest.mark.parametrize(
    ("program", "attribute"),
    [
        ("import sys; print('error: no such model'); sys.exit(2)", "refused"),
        ("import sys; print('error: out of memory'); sys.exit(1)", "gave_up"),
    ],
)
def test_workers_that_cannot_work_are_told(
    program: str, attribute: str, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    the_worker_is(monkeypatch, program)
    with begun(order) as node:
        answer = told(node, lambda answer: answer.refused or answer.gave_up)
        assert "error: " in getattr(answer, attribute)


def test_nothing_is_left_at_the_end(order: dict[str, Any]) -> None:
    node = _RunHere(order)
    root = node._run.root
    assert root.is_dir() and root.stat().st_mode & 0o777 == 0o700
    assert server_alive(root)
    node.end(finished=True)
    assert not root.exists()


@pytest.mark.parametrize("there", ["the same", "another", "another user's", "nothing"])
def test_the_setup_file_is_taken_from_its_place_where_it_is_there(
    there: str, order: dict[str, Any], tmp_path: Path
) -> None:
    """Then modules of folders above are found too."""
    file = tmp_path / "project" / "setup.py"
    sent = file.read_text()
    if there == "another":
        file.write_text("def get_trainer(): raise SystemExit\n")
    elif there == "another user's":  # who may have put a trl.py beside it
        order["tree"] = of_another_user(order["tree"])
    elif there == "nothing":
        file.unlink()
    with begun(order) as node:
        config = node._state.plan.config
        assert config == (file if there == "the same" else node._run.root / "setup" / "setup.py")
        assert config.read_text() == sent


def of_another_user(tree: bytes) -> bytes:
    found = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(tree)) as tar, tarfile.open(fileobj=found, mode="w") as theirs:
        for member in tar:
            member.uid += 1
            theirs.addfile(member, tar.extractfile(member))
    return found.getvalue()


def test_what_a_killed_actor_left_is_deleted_by_the_next(order: dict[str, Any], monkeypatch: Any) -> None:
    left, others = (Path(order["node_dir"]) / f"async-grpo-{run}-8-{os.getpid()}-1" for run in (RUN, "run-2"))
    left.mkdir()
    others.mkdir()
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
        far._tidy_up(left.parent, RUN)
    assert left.exists()
    _RunHere(order).end(finished=False)
    assert not left.exists() and others.exists()


def test_what_another_actor_has_just_made_is_left_alone(order: dict[str, Any]) -> None:
    """It has no lock there yet. Two nodes of a run may be on one machine."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as actor:
        birth = far._birth(str(actor.pid))
        made = Path(order["node_dir"]) / f"async-grpo-{RUN}-9-{actor.pid}-{birth}"
        made.mkdir()
        _RunHere(order).end(finished=False)
        assert birth and made.exists()
        actor.kill()
    _RunHere({**order, "number": 7}).end(finished=False)  # the first one's cleaner may still be at its folder
    assert not made.exists()


def test_the_run_directory_goes_when_the_actor_is_killed_and_its_workers_have_ended(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with closing(WorkerQueue.open(root, 1, "cpu")):
        far._cleaner_of(root).close()  # as the kernel does
        time.sleep(0.3)
        assert root.exists()
    until_gone(tmp_path)


def test_a_worker_that_does_not_end_with_its_actor_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, env = tmp_path / "run", {**os.environ, "PYTHONPATH": path_to_us(os.environ)}
    program = "import sys, time; from async_grpo.queue import WorkerQueue; WorkerQueue.open(sys.argv[1], 1, 'cpu')"
    with subprocess.Popen([sys.executable, "-c", f"{program}; time.sleep(600)", str(root)], env=env) as worker:
        lock = root / "alive" / "dev1.lock"
        while not (lock.exists() and leftovers.holder(lock) == worker.pid):
            assert worker.poll() is None
            time.sleep(0.01)
        monkeypatch.setattr(leftovers, "END_S", 0.2)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO()))
        leftovers.main(root)
        assert worker.wait(30) == -signal.SIGKILL
    assert not root.exists()


def test_a_folder_that_cannot_be_used_is_refused(
    order: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be written, a disk of the network, and one that is full; of that nothing is left."""
    monkeypatch.setattr(far, "end_with_parent", lambda *given: None)
    assert far.FarNode().begin({**order, "node_dir": "/proc"})
    with monkeypatch.context() as changed:
        changed.setattr(folders, "network_file_system", lambda path: "NFS")
        assert "is on NFS. A run needs a local disk" in far.FarNode().begin(order)

    with monkeypatch.context() as changed:
        changed.setattr(far.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
        assert "/local: the disk is full. Make room" in far.FarNode().begin(order)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(far, "is_there", lambda *_: False)
    monkeypatch.setattr(far, "unpack", full)
    assert far.FarNode().begin(order) == f"{tmp_path}/local: the disk is full. Make room, or choose another place."
    until_gone(tmp_path / "local")


def until_gone(folder: Path) -> None:
    """Wait until nothing is left in a folder."""
    until(lambda: not list(folder.iterdir()), "an empty folder", said=lambda: str(list(folder.iterdir())))


def test_facts_are_plain_values() -> None:
    facts = far.facts()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["torch"] and facts["versions"]["async-grpo"]


def test_no_clock_is_read_that_others_could_have_set() -> None:
    """What lasts is measured by the monotonic clock, and never sent."""
    folder = Path(far.__file__).parent
    clocks = re.compile(r"time\.time|datetime|st_[mca]time|localtime|gmtime")
    found = {path.name for path in folder.glob("*.py") if clocks.search(path.read_text())}
    assert not found and clocks.search((folder.parent / "rundir" / "locks.py").read_text())


def test_the_actor_has_no_handle_of_the_servers_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_IPC_HANDLE_PATH", "/elsewhere")
    monkeypatch.setattr(far, "end_with_parent", lambda *given: None)
    far.FarNode()
    assert "CUDA_IPC_HANDLE_PATH" not in os.environ
