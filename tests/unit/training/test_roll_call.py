"""The ranks and machines of a trainer: who is missing or differs at the start, who is missed later, and who waits."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from async_grpo.errors import PeerDiedError, UsageError
from async_grpo.launch.accelerate_entry import machine_of
from async_grpo.queue.codec import decode_group
from async_grpo.rundir.run_plan import RunPlan, TRLCall
from async_grpo.settings import LaunchSettings
from async_grpo.setup.process import StopRequest
from async_grpo.telemetry.ranks_file import read_ranks, write_ranks
from async_grpo.training import distributed, machines
from async_grpo.training.distributed import Follower, Leader, Message, Ranks
from async_grpo.training.machines import Heartbeat, TrainerMachine
from kit.groups import make_group, make_job
from kit.waiting import until

WAIT_S = 60.0
LONG_S = 100.0  # longer than silence
ABOUT = {"name": "gpu0", "versions": {"torch": "2.13.0"}, "setup": "abc", "ranks": [2, 4, "FSDP", 2]}
RUN = {"state": {}, "name": "gpu0"}
hearts: list[Heartbeat] = []


@pytest.fixture
def here() -> TrainerMachine:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return TrainerMachine(0, 2, f"127.0.0.1:{probe.getsockname()[1]}")


def meet(
    here: TrainerMachine, other: dict[str, Any], wait_s: float = WAIT_S
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What the roll call gives to machine 0, and to another that says this of itself."""
    held = machines.hold(here)
    there = TrainerMachine(1, here.count, here.address)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(machines.call_roll, held, here, ABOUT, RUN, wait_s)
        second = pool.submit(machines.answer_roll, machines.reach(there, WAIT_S), there, other, wait_s)
    return first.result, second.result


def test_machines_that_are_alike_get_the_run_of_machine_0(here: TrainerMachine) -> None:
    first, second = meet(here, {**ABOUT, "name": "gpu1"})
    assert (first(), second()) == (None, RUN)


@pytest.mark.parametrize(
    ("machine_count", "other", "wait_s", "said"),
    [
        (2, {"versions": {"torch": "2.12.1"}}, WAIT_S, "Machine 1 (gpu1) has torch 2.12.1, and machine 0 2.13.0"),
        (2, {"versions": {}}, WAIT_S, "Machine 1 (gpu1) has torch (not installed)"),
        (2, {"setup": "abd"}, WAIT_S, "Machine 1 (gpu1) has another setup file than machine 0"),
        (2, {"ranks": [2, 2, "FSDP", 2]}, WAIT_S, "Machine 1 (gpu1) has another accelerate configuration than"),
        (4, {}, 2.0, "of --machine-rank 2, 3 nothing was heard within 2 s (--node-wait)"),
    ],
)
def test_who_is_missing_or_differs_is_named_on_every_machine(
    here: TrainerMachine, machine_count: int, other: dict[str, Any], wait_s: float, said: str
) -> None:
    for outcome in meet(TrainerMachine(0, machine_count, here.address), {**ABOUT, "name": "gpu1", **other}, wait_s):
        with pytest.raises(UsageError) as refused:
            outcome()
        assert said in str(refused.value)


def test_a_number_that_is_taken_and_a_machine_0_that_is_not_there_are_refused(here: TrainerMachine) -> None:
    with pytest.raises(UsageError, match="machine 0 has not answered within 0 s"):
        machines.reach(here, 0)
    held = machines.hold(here)
    with pytest.raises(UsageError, match="machine 0 cannot listen there"):
        machines.hold(here)
    with pytest.raises(UsageError, match=r"localhost is 127.0.0.1 on this machine"):
        machines.hold(TrainerMachine(0, 2, "localhost:0"))
    held.add("taken/1", 1)
    with pytest.raises(UsageError, match="--machine-rank 1: another machine has said so"):
        machines.answer_roll(held, TrainerMachine(1, 2, here.address), ABOUT, 0)


def test_a_machine_0_that_is_gone_without_a_word_ends_the_roll_call(
    here: TrainerMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one without power: what was asked of its store is never answered."""
    held = machines.hold(here)
    monkeypatch.setattr(machines.socket, "create_connection", Mock(side_effect=TimeoutError))
    with pytest.raises(PeerDiedError, match="has ended before the start"):
        machines.answer_roll(held, TrainerMachine(1, 2, here.address), ABOUT, WAIT_S)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The exit codes that heartbeats would have ended with. All of them end here."""
    codes: list[int] = []
    monkeypatch.setattr(machines, "leave_at_once", codes.append)
    monkeypatch.setattr(machines, "BEAT_S", 0.02)
    yield codes
    while hearts:
        hearts.pop().leave()


def rank(here: TrainerMachine, number: int, **options: Any) -> Heartbeat:
    """The heartbeat of one of two ranks, each on a machine of its own."""
    env = {"GROUP_RANK": str(number), "RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    heart = Heartbeat.of_rank({**env, machines.ADDRESS: here.address}, **options)
    assert heart is not None
    hearts.append(heart)
    return heart


@pytest.fixture
def store(here: TrainerMachine) -> Any:
    """The store of machine 0, after the roll call of two."""
    held = machines.hold(here)
    for number in range(2):
        held.set(f"machine/{number}", json.dumps({**ABOUT, "name": f"gpu{number}"}))
        held.set(f"beat/machine {number} (gpu{number})", json.dumps({"count": 1, "left": True}))
    return held


def test_a_rank_that_falls_silent_ends_the_others_with_its_name_and_machine(
    here: TrainerMachine, store: Any, ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    failed: list[str] = []
    other = rank(here, 0, failed=failed.append)._others["rank 1 on machine 1 (gpu1)"]
    store.set("beat/rank 1 on machine 1 (gpu1)", json.dumps({"count": 7}))
    until(lambda: other.beat.count == 7)
    other.heard_s -= LONG_S
    until(lambda: ends)
    assert ends == [PeerDiedError.exit_code]
    assert "rank 1 on machine 1 (gpu1) has not answered for 25 s" in failed[0] and failed[0] in capsys.readouterr().err


def test_a_machine_that_ends_between_the_roll_call_and_its_first_beat_is_missed(
    here: TrainerMachine, store: Any, ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store.delete_key("beat/machine 1 (gpu1)")
    rank(here, 0)._others["machine 1 (gpu1)"].heard_s -= LONG_S
    until(lambda: ends)
    assert "machine 1 (gpu1) has not answered for 25 s" in capsys.readouterr().err


def test_a_rank_of_this_machine_that_dies_is_told_to_all(
    here: TrainerMachine, store: Any, ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    dead: Any = SimpleNamespace(pid=7, is_running=lambda: False)
    rank(here, 0).siblings = {2: dead}
    until(lambda: ends)
    said = "rank 2 on machine 0 (gpu0) (pid 7) has died"
    assert said in capsys.readouterr().err and store.get("ended").decode() == said


def test_a_rank_that_has_not_begun_or_has_left_is_not_missed_and_a_stop_reaches_rank_0(
    here: TrainerMachine, store: Any, ends: list[int], tmp_path: Path
) -> None:
    stop, file = StopRequest(), tmp_path / "ranks.json"
    heart = rank(here, 0, stop=stop, report=lambda beats: write_ranks(file, beats))
    heart._others["rank 1 on machine 1 (gpu1)"].heard_s -= LONG_S
    until(lambda: heart.mine.count > 20)
    assert not stop.requested
    left = {"count": 3, "step": 5, "doing": "trains", "stop": True, "left": True}
    store.set("beat/rank 1 on machine 1 (gpu1)", json.dumps(left))
    until(lambda: stop.requested)
    heart._others["rank 1 on machine 1 (gpu1)"].heard_s -= LONG_S
    seen = heart.mine.count
    until(lambda: heart.mine.count > seen + 20)
    assert ends == []
    assert read_ranks(file)["rank 1 on machine 1 (gpu1)"].step == 5
    heart.leave()


def test_what_a_machine_says_of_its_rank_ends_the_others_at_once(
    here: TrainerMachine, store: Any, ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    heart = rank(here, 0)
    of_machine = Heartbeat.of_machine(TrainerMachine(1, 2, here.address))
    of_machine.say_ended(f"rank 1 on {of_machine.me} ended with exit code -9")
    of_machine.say_ended("rank 0 ended by it")
    until(lambda: ends)
    assert "rank 1 on machine 1 (gpu1) ended with exit code -9" in capsys.readouterr().err
    assert heart.mine.left


def test_a_machine_that_is_asked_to_end_says_so_unless_rank_0_has_left(
    here: TrainerMachine, store: Any, ends: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    rank(here, 1)
    of_machine, beat = Heartbeat.of_machine(here), "beat/rank 0 on machine 0 (gpu0)"
    store.set(beat, json.dumps({"count": 3, "left": True}))
    of_machine.say_stopped()
    assert not store.check(["ended"])
    store.delete_key(beat)  # rank 0 still loads
    of_machine.say_stopped()
    until(lambda: ends)
    assert "machine 0 (gpu0) was asked to end" in capsys.readouterr().err


def test_a_trainer_on_one_machine_has_no_heartbeat() -> None:
    assert Heartbeat.of_rank({}) is None


def config(folder: Path, **fields: Any) -> Path:
    path = folder / "two.yaml"
    path.write_text(json.dumps({"num_machines": 2, "num_processes": 4, **fields}))
    return path


def test_the_place_is_what_the_file_says_or_the_command_line(tmp_path: Path) -> None:
    file = config(tmp_path, machine_rank=1, main_process_ip="gpu0", main_process_port=29500)
    of_file = LaunchSettings(accelerate_config=file)
    assert machine_of(RunPlan(config=file, launch=of_file)) == TrainerMachine(1, 2, "gpu0:29500")
    given = LaunchSettings(accelerate_config=file, machine_rank=0, main_process="10.0.0.1:7")
    assert machine_of(RunPlan(config=file, launch=given)) == TrainerMachine(0, 2, "10.0.0.1:7")


@pytest.mark.parametrize(
    ("fields", "options", "said"),
    [
        ({"num_machines": 1}, {"machine_rank": 0}, "the trainer is on one machine"),
        ({}, {"machine_rank": 1}, "say where machine 0 is, --main-process HOST:PORT"),
        ({}, {"machine_rank": 2, "main_process": "a:1"}, "has 2 machines and 4 processes, and this is machine 2"),
        ({"num_processes": 3}, {"main_process": "a:1"}, "has 2 machines and 3 processes"),
        ({"distributed_type": "DEEPSPEED"}, {"main_process": "a:1"}, "DeepSpeed on several machines"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    file = config(tmp_path, **fields)
    with pytest.raises(UsageError) as refused:
        machine_of(RunPlan(config=file, launch=LaunchSettings(accelerate_config=file, **options)))
    assert said in str(refused.value)


def test_what_only_this_machine_has_cannot_be_trained_on_several(tmp_path: Path) -> None:
    launch = LaunchSettings(accelerate_config=config(tmp_path), main_process="a:1")
    plan = RunPlan(config=tmp_path / "setup.py", launch=launch, trl=TRLCall([], "."))
    with pytest.raises(UsageError, match="by a command, with a setup file that each machine has"):
        machine_of(plan)


# --- The other ranks wait as long as rank 0 does, e.g ------------------------------------------------------------


class FakeRanks:
    """Messages that are kept, and given to a follower in order."""

    def __init__(self, *messages: tuple[Message, bytes]) -> None:
        self.sent = list(messages)
        self.given: dict[int, list[int]] = {}  # places of prompt groups, by rank

    def check_alive(self) -> None: ...

    def says(self, doing: str, step: int | None = None) -> None: ...

    def send(self, message: Message, payload: bytes = b"") -> None:
        self.sent.append((message, payload))

    def give(self, rank: int, data: bytes) -> None:
        self.given.setdefault(rank, []).append(decode_group(data).job.seq)

    def receive(self) -> tuple[Message, bytes]:
        return self.sent.pop(0)


def test_each_rank_is_given_the_groups_that_it_has_rows_of() -> None:
    """Six groups of 2 completions, for four ranks of 3: two groups have rows of two ranks."""
    ranks: Any = FakeRanks()
    args = SimpleNamespace(world_size=4, generation_batch_size=12)
    trainer: Any = SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=4), num_generations=2)
    Leader(trainer, ranks, StopRequest()).hand_out([make_group(make_job(seq), 0) for seq in range(6)])
    assert ranks.sent == [(Message.GROUPS, b"")]
    assert ranks.given == {1: [1, 2], 2: [3, 4], 3: [4, 5]}


def test_a_long_wait_of_rank_0_is_told_to_the_others_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(distributed.time, "monotonic", lambda: now[0])
    ranks: Any = FakeRanks()
    trainer: Any = None
    leader = Leader(trainer, ranks, StopRequest())
    for now[0] in range(0, 3 * 3600, 30):  # three hours: longer than a message may take
        assert not leader.should_stop()
    assert 3 * 3600 / distributed.MESSAGE_TIMEOUT_S < len(ranks.sent) < 30
    assert {message for message, _ in ranks.sent} == {Message.WAIT}
    leader.go()
    now[0] += distributed.WAIT_EVERY_S - 1
    leader.should_stop()
    assert ranks.sent[-1] == (Message.GO, b""), "any message counts"


def test_the_others_wait_on() -> None:
    follower = object.__new__(Follower)
    ranks: Any = FakeRanks((Message.WAIT, b""), (Message.WAIT, b""), (Message.GO, b"stop"))
    follower._ranks = ranks
    assert follower.step_done() is False


@pytest.mark.parametrize(
    ("dead", "sentence"),
    [({2}, r"Rank 2 of the trainer \(pid 102\) has died"), ({2, 3}, r"Ranks 2, 3 .* \(pids 102, 103\) have died")],
)
def test_every_rank_that_has_died_is_named(dead: set[int], sentence: str) -> None:
    """One that has lost its neighbour ends too, and may be seen first."""
    ranks = object.__new__(Ranks)
    living: Any = [
        SimpleNamespace(pid=100 + rank, is_running=lambda rank=rank: rank not in dead, status=lambda: "running")
        for rank in range(4)
    ]
    ranks._here, ranks._heartbeat = dict(enumerate(living)), None
    with pytest.raises(PeerDiedError, match=sentence):
        ranks.check_alive()
