"""The other ranks wait as long as rank 0 does, e.g. for an evaluation of many hours; those that have died are named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import PeerDiedError
from async_grpo.queue.codec import decode_group
from async_grpo.setup.process import StopRequest
from async_grpo.training import distributed
from async_grpo.training.distributed import Follower, Leader, Message, Ranks
from kit.groups import make_group, make_job


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


def test_each_rank_is_given_the_groups_that_it_has_rows_of() -> None:
    """Six groups of 2 completions, for four ranks of 3: two groups have rows of two ranks."""
    ranks: Any = FakeRanks()
    args = SimpleNamespace(world_size=4, generation_batch_size=12)
    trainer: Any = SimpleNamespace(args=args, accelerator=SimpleNamespace(num_processes=4), num_generations=2)
    Leader(trainer, ranks, StopRequest()).hand_out([make_group(make_job(seq), 0) for seq in range(6)])
    assert ranks.sent == [(Message.GROUPS, b"")]
    assert ranks.given == {1: [1, 2], 2: [3, 4], 3: [4, 5]}


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
