"""A far node as a worker of the queue: what it makes arrives, and what it has comes back when it is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from node_fakes import FakeFarNode, FakeVersions

from async_grpo.errors import PeerDiedError
from async_grpo.nodes import seat as seats
from async_grpo.nodes.node import SentJob
from async_grpo.nodes.seat import FarNodeSeat, NodeRefused, words_of
from async_grpo.nodes.sending import WeightsPiece
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_job
from async_grpo.queue.names import NOT_TRAINED_ON
from async_grpo.records import Job, RolloutGroup
from async_grpo.rundir.run_plan import RunPlan
from async_grpo.setup.process import path_to_us
from async_grpo.telemetry.activity import Activity
from async_grpo.telemetry.nodes_file import NodeRecord
from kit.groups import RUN, make_group, make_job
from kit.waiting import until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(tmp_path / "q", RUN, max_attempts=3)) as queue:
        yield queue


def answered(sent: SentJob, job: Job) -> RolloutGroup:
    return make_group(job)


def a_seat(
    root: Path, node: FakeFarNode, versions: FakeVersions, queue: WorkerQueue, figures: NodeRecord
) -> FarNodeSeat:
    return FarNodeSeat(
        node,
        queue,
        versions,  # type: ignore[arg-type]
        RunPlan(config=Path("setup.py")),
        name="gpu3",
        workers=2,
        states=root / "trainer_states.jsonl",
        log=root / "log_node_gpu3.txt",
        activity=Activity(),
        figures=figures,
    )


@contextmanager
def served(root: Path, node: FakeFarNode, versions: FakeVersions | None = None) -> Iterator[list[BaseException]]:
    """The node as worker 8, in a thread; yields the errors that end it."""
    ended: list[BaseException] = []
    goes_on = threading.Event()
    goes_on.set()

    def serve() -> None:
        with closing(WorkerQueue.open(root, 8, "gpu3: 2 workers", far_workers=2)) as queue:
            try:
                a_seat(root, node, versions or FakeVersions(), queue, NodeRecord()).serve(goes_on)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ended
    finally:
        goes_on.clear()
        thread.join(30)
        assert not thread.is_alive()


def states(root: Path) -> list[str]:
    return sorted(path.name.removesuffix(".safetensors")[8:] for path in (root / "queue").iterdir())


def test_what_a_node_makes_arrives_with_its_name(server: ServerQueue) -> None:
    for seq in range(6):
        server.submit(make_job(seq))
    with served(server.root, FakeFarNode(answered)):
        until(lambda: len(server.finished()) == 6, "six groups")
    groups = [server.take(name) for name in server.finished()]
    assert {(group.worker, group.node, group.attempt) for group in groups if group} == {("dev8", "gpu3", 0)}
    assert server.healing == type(server.healing)()


def test_a_silent_node_gives_its_jobs_back_with_the_same_attempt(
    server: ServerQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seats, "SILENCE_S", 0.1)
    node = FakeFarNode(lambda sent, job: None)
    for round_ in range(4):  # more often than a job may fail
        with served(server.root, node) as ended:
            if not round_:
                server.submit(make_job(1))
            until(lambda: states(server.root) == ["01.a00_processing_by_dev8"], "the claim")
            node.is_silent = True
            until(lambda: ended, "the silence to be noticed")
        assert isinstance(ended[0], PeerDiedError) and "has not answered for 0.1 s" in str(ended[0])
        assert states(server.root) == ["01.a00_pending"]
        node.is_silent = False


def test_a_failure_that_the_node_reports_counts(server: ServerQueue) -> None:
    server.submit(make_job(1))
    server.submit(make_job(2))
    node = FakeFarNode(lambda sent, job: "ValueError: no answer" if job.seq == 1 else make_group(job))
    with served(server.root, node):
        until(lambda: server.finished() and 1 in server.given_up, "the poison to be given up")
    assert [sent.attempt for sent in node.sent if decode_job(sent.data).seq == 1] == [0, 1, 2]
    assert "on node gpu3: ValueError: no answer" in server.given_up[1].reason
    assert [server.take(name) is not None for name in server.finished()] == [True]


def test_an_evaluation_is_for_a_node_that_has_its_version(server: ServerQueue) -> None:
    server.submit(make_job(1))
    server.submit(make_job(NOT_TRAINED_ON, purpose="eval"))
    node, versions = FakeFarNode(answered), FakeVersions(7)
    node.version = 6
    with served(server.root, node, versions):
        until(server.finished, "the group to train on")
        assert not server.finished("eval") and [sent.version for sent in node.sent] == [7]
        node.version = 7
        until(lambda: server.finished("eval"), "the evaluation")


def test_a_node_takes_its_share_and_no_more(server: ServerQueue) -> None:
    for seq in range(9):
        server.submit(make_job(seq))
    node = FakeFarNode(lambda sent, job: None)
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as local, served(server.root, node):
        until(lambda: len(node.sent) == 6, "two thirds, for two of three workers")
        assert local.alive_workers() == 3
        assert local.pending() == 3
        node.scored = 6  # as a worker here, it samples others meanwhile
        until(lambda: len(node.sent) == 8, "two thirds of the rest")
        assert local.pending() == 1


def test_a_node_without_workers_or_weights_claims_nothing(server: ServerQueue) -> None:
    server.submit(make_job(1))
    node = FakeFarNode(answered, workers=0)
    with served(server.root, node):
        until(lambda: node.version is not None, "nothing")
        time.sleep(0.1)
        assert not node.sent


class OneWhole(FakeVersions):
    """A version in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.puts = 1

    def pieces(self, since: int | None) -> Iterator[WeightsPiece]:
        yield WeightsPiece({"kind": "whole"}, self.puts, 100_000_000)  # 4 s on a slow link

    def took(self, nbytes: int, seconds: float) -> None: ...

    def put_again(self, late: WeightsPiece) -> None:
        assert late.data == self.puts
        self.puts += 1


def test_weights_that_have_not_arrived_are_put_and_sent_again_with_more_patience(server: ServerQueue) -> None:
    node, versions = FakeFarNode(answered), OneWhole()
    node.late = 2
    with served(server.root, node, versions):
        until(lambda: len(node.patience) == 3, "the weights")
    assert node.patience == [14, 28, 56] and versions.puts == 3


def test_a_call_that_fails_is_the_end_of_the_node(server: ServerQueue) -> None:
    node = FakeFarNode(answered)
    server.submit(make_job(1))
    node._answer = Mock(side_effect=RuntimeError("The actor died unexpectedly.\nlong explanation"))
    with pytest.raises(RuntimeError), closing(WorkerQueue.open(server.root, 8, "x", far_workers=2)) as queue:
        a_seat(server.root, node, FakeVersions(), queue, NodeRecord())._exchange()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: FarNode\n\tactor_id: 0f91\n"
            "The actor died because its node has died. Some common causes include: (1) the moon",
            "The actor died because its node has died.",
        ),
        (
            "\x1b[36mray::FarNode.receive()\x1b[39m (pid=7)\n  File x\nOSError: [Errno 28] No space",
            "OSError: [Errno 28] No space",
        ),
        ("", "RuntimeError"),
    ],
)
def test_what_ray_says_is_told_in_a_line_without_ids(said: str, words: str) -> None:
    assert words_of(RuntimeError(said)) == words


def test_a_refusal_names_the_node(server: ServerQueue) -> None:
    node = FakeFarNode(answered)
    before = node._answer
    node._answer = lambda: {**before(), "refused": "error: no model"}  # type: ignore[method-assign]
    with served(server.root, node) as ended:
        until(lambda: ended, "the refusal")
    assert isinstance(ended[0], NodeRefused) and str(ended[0]) == "on node gpu3: error: no model"


HOLDER = """
import sys, time
from pathlib import Path
from async_grpo.queue import WorkerQueue
queue = WorkerQueue.open(Path(sys.argv[1]), 8, "x", far_workers=int(sys.argv[2]))
while not queue.claim(1):
    time.sleep(0.01)
print("has it", flush=True)
time.sleep(600)
"""


def kill_one_that_has_the_job(root: Path, far_workers: int) -> None:
    command = [sys.executable, "-c", HOLDER, str(root), str(far_workers)]
    env = {**os.environ, "PYTHONPATH": path_to_us(os.environ)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"has it\n"
        holder.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(("far_workers", "after"), [(2, "01.a00_pending"), (0, "01.a01_pending")])
def test_the_death_of_a_gate_is_no_attempt_and_that_of_a_worker_is_one(
    server: ServerQueue, far_workers: int, after: str
) -> None:
    server.submit(make_job(1))
    kill_one_that_has_the_job(server.root, far_workers)
    until(lambda: states(server.root) == [after], f"{after}, not {states(server.root)}")


def test_what_a_dead_gate_left_is_taken_over_without_an_attempt(tmp_path: Path) -> None:
    """The next gate may be faster than the server."""
    with closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as server:
        server.submit(make_job(1))
        kill_one_that_has_the_job(server.root, 2)
        with closing(WorkerQueue.open(server.root, 8, "x", far_workers=2)):
            assert states(server.root) == ["01.a00_pending"]
