"""Groups on their way through TRL, with a trainer that only asks for tokens and an engine played by the test."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.rollout.group_threads import GroupThreads
from async_grpo.rollout.in_flight import GroupCode, GroupInFlight, Turn, versions_of_tokens
from async_grpo.rollout.whole_groups import WholeGroups

Code = Callable[[Any, Any], Any]  # what a group does: (generator, row) -> its group
DEADLINE_S = 60.0


class FakeTrainer:
    """Runs the test's code in place of TRL's."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.generator: Any = None
        self.state = SimpleNamespace(global_step=0)
        self.forks = 0
        self.batches: list[int] = []  # groups that were prepared or finished together

    def fork(self) -> Any:
        self.forks += 1
        return copy.copy(self)

    def generate_groups(self, rows: list[Any], group_size: int) -> list[Any]:
        return [self.code(self.generator, rows[0])]

    def prepare_groups(self, rows: list[Any], group_size: int) -> list[Any]:
        self.batches.append(len(rows))
        return [self._prepare(row) for row in rows]

    def _prepare(self, row: Any) -> Any:
        pauses = Pauses()
        try:
            self.code(pauses, row)
        except Paused:
            return SimpleNamespace(row=row, prompt_ids=pauses.prompt_ids)

    def finish_groups(self, prepared: list[Any], sampled: list[Any]) -> list[Any]:
        self.batches.append(len(prepared))
        return [
            self.code(SimpleNamespace(generate=lambda prompt_ids, given=given: given), one.row)
            for one, given in zip(prepared, sampled, strict=True)
        ]


class Paused(BaseException):
    pass


class Pauses:
    prompt_ids: Any = None

    def generate(self, prompt_ids: Any) -> Any:
        self.prompt_ids = prompt_ids
        raise Paused


def claim(row: Any, seq: int = 0) -> Any:
    return SimpleNamespace(job=SimpleNamespace(seq=seq, row=row, num_generations=2))


def nothing(trainer: Any, group: GroupInFlight) -> None:
    return None


def next_events(code: GroupCode, wanted: int) -> list[Turn | GroupInFlight]:
    events: list[Turn | GroupInFlight] = []
    while len(events) < wanted:
        found = code.events(DEADLINE_S)
        assert found, "nothing happened"
        events += found
    return events


def one_turn(generator: Any, row: Any) -> Any:
    return generator.generate([[row], [row + 1]])


both = pytest.mark.parametrize("kind", [GroupThreads, WholeGroups])


@both
def test_a_group_waits_for_its_tokens_and_gets_them(kind: Callable[..., GroupCode]) -> None:
    threads = kind(FakeTrainer(one_turn), nothing)
    (group,) = threads.start([claim(10)], version=3)
    (turn,) = next_events(threads, 1)
    assert isinstance(turn, Turn)
    assert turn.prompt_ids == [[10], [11]]
    turn.add(0, [1, 2], [-0.1, -0.2], 3, finished=False)
    turn.add(1, [5], [-0.5], 3, finished=True)
    assert threads.events(0) == []
    turn.add(0, [3], [-0.3], 4, finished=True)
    assert next_events(threads, 1) == [group]
    assert group.group == ([[1, 2, 3], [5]], [[-0.1, -0.2, -0.3], [-0.5]])
    assert group.oldest_version() == 3


def test_groups_wait_side_by_side_and_copies_are_used_again() -> None:
    trainer = FakeTrainer(one_turn)
    threads = GroupThreads(trainer, nothing)
    for row in (10, 20):
        threads.start([claim(row)], version=0)
    turns = next_events(threads, 2)
    assert trainer.forks == 2
    for turn in turns:
        assert isinstance(turn, Turn)
        for place in (0, 1):
            turn.add(place, [turn.prompt_ids[place][0] + 100], [0.0], 0, finished=True)
    ended = next_events(threads, 2)
    assert sorted(group.group[0][0][0] for group in ended) == [110, 120]
    threads.start([claim(30)], version=0)
    next_events(threads, 1)
    assert trainer.forks == 2


def serve(code: GroupCode, rows: list[Any]) -> dict[Any, GroupInFlight]:
    """Start a group for each row, let the engine answer all turns at once, and return the groups."""
    code.start([claim(row, seq) for seq, row in enumerate(rows)], version=0)
    groups: dict[Any, GroupInFlight] = {}
    while len(groups) < len(rows):
        for event in next_events(code, 1):
            if isinstance(event, GroupInFlight):
                groups[event.claim.job.row] = event
            else:
                for place in range(len(event.prompt_ids)):
                    event.add(place, [event.prompt_ids[place][0] + 100], [0.0], 0, finished=True)
    return groups


def test_groups_that_start_or_end_together_go_through_trl_together() -> None:
    trainer = FakeTrainer(one_turn)
    code = WholeGroups(trainer, nothing)
    groups = serve(code, [10, 20, 30])
    assert trainer.batches == [3, 3]
    assert [groups[row].group[0] for row in (10, 20, 30)] == [[[row + 100], [row + 101]] for row in (10, 20, 30)]  # type: ignore[index]


@both
@pytest.mark.parametrize("place", ["before", "after", "afterwards"])
def test_an_error_costs_one_group_of_those_that_go_together(kind: Callable[..., GroupCode], place: str) -> None:
    def code(generator: Any, row: int) -> Any:
        if place == "before" and row == 20:
            raise RuntimeError("no such prompt")
        made = one_turn(generator, row)
        if place == "after" and row == 20:
            raise RuntimeError("no such text")
        return made

    looked_at: list[int] = []

    def afterwards(trainer: Any, group: GroupInFlight) -> int:
        looked_at.append(row := group.claim.job.row)
        if place == "afterwards" and row == 20:
            raise RuntimeError("no such reward")
        return row

    groups = serve(kind(FakeTrainer(code), afterwards), [10, 20, 30])
    assert {row: group.result for row, group in groups.items()} == {10: 10, 20: None, 30: 30}
    assert groups[20].error is not None and "no such" in groups[20].traceback
    assert sorted(looked_at) == ([10, 20, 30] if place == "afterwards" else [10, 30]), "a reward is never asked twice"


def test_only_one_group_runs_code_at_a_time() -> None:
    running: list[int] = []
    most: list[int] = []

    def code(generator: Any, row: int) -> Any:
        for _ in range(20):
            running.append(row)
            most.append(len(running))
            threading.Event().wait(0.001)
            running.remove(row)
        return generator.generate([[row]])

    threads = GroupThreads(FakeTrainer(code), nothing)
    for row in range(4):
        threads.start([claim(row)], version=0)
    next_events(threads, 4)
    assert max(most) == 1


@both
@pytest.mark.parametrize("before", [True, False])
def test_an_error_of_the_users_code_is_the_groups(kind: Callable[..., GroupCode], before: bool) -> None:
    def code(generator: Any, row: Any) -> Any:
        if not before:
            generator.generate([])
        raise RuntimeError("the tool broke")

    threads = kind(FakeTrainer(code), nothing)
    threads.start([claim(1)], version=0)
    if not before:
        (turn,) = next_events(threads, 1)
        assert isinstance(turn, Turn)
        turn._on_done()
    (group,) = next_events(threads, 1)
    assert isinstance(group, GroupInFlight)
    assert isinstance(group.error, RuntimeError)
    assert "the tool broke" in group.traceback


@both
def test_an_error_of_the_engine_reaches_the_group(kind: Callable[..., GroupCode]) -> None:
    threads = kind(FakeTrainer(one_turn), nothing)
    threads.start([claim(1)], version=0)
    (turn,) = next_events(threads, 1)
    assert isinstance(turn, Turn)
    turn.fail(ValueError("the prompt is too long"))
    (group,) = next_events(threads, 1)
    assert isinstance(group, GroupInFlight)
    assert "the prompt is too long" in group.traceback


@both
def test_what_comes_afterwards_runs_before_the_copy_serves_another(kind: Callable[..., GroupCode]) -> None:
    def code(generator: Any, row: Any) -> Any:
        ids, _ = generator.generate([[row]])
        return ids

    trainer = FakeTrainer(code)
    threads = kind(trainer, lambda trainer, group: ("scored", group.group, trainer.state.global_step))
    threads.start([claim(5)], version=2)
    (turn,) = next_events(threads, 1)
    assert isinstance(turn, Turn)
    turn.add(0, [6], [-1.0], 2, finished=True)
    (group,) = next_events(threads, 1)
    assert isinstance(group, GroupInFlight)
    assert group.result == ("scored", [[6]], 2), "the version that generated is what rewards see as the step"


@both
def test_a_wait_for_events_can_be_ended(kind: Callable[..., GroupCode]) -> None:
    threads = kind(FakeTrainer(one_turn), nothing)
    threading.Timer(0.05, threads.wake).start()
    assert threads.events(DEADLINE_S) == []


def turn_of(prompts: list[list[int]], ids: list[list[int]], versions: list[list[int]]) -> Turn:
    turn = Turn(GroupInFlight(claim(0), 0), 0, prompts, lambda: None)
    turn.token_ids, turn.versions = ids, versions
    return turn


def test_every_token_knows_its_version_through_a_tool_loop() -> None:
    prompt = [1, 2]
    # The second row calls a tool, which writes 90; the third does, too, and is cut to its limit.
    group = SimpleNamespace(
        prompt_ids=[prompt] * 3,
        completion_ids=[[10, 11], [20, 90, 21, 22], [30, 90, 31]],
    )
    first = turn_of([prompt] * 3, [[10, 11], [20], [30]], [[4, 5], [4], [4]])
    second = turn_of([[1, 2, 20, 90], [1, 2, 30, 90]], [[21, 22], [31, 32]], [[5, 6], [6, 7]])
    assert versions_of_tokens(group, [first, second], default=4) == [[4, 5], [4, 4, 5, 6], [4, 4, 6]]  # type: ignore[arg-type]


def test_a_group_that_waits_says_who_died() -> None:
    threads = GroupThreads(FakeTrainer(one_turn), nothing)
    threads._engine_thread = threading.Thread(target=lambda: None)
    threads._engine_thread.start()
    threads._engine_thread.join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("async_grpo.rollout.group_threads.LOOK_S", 0.01)
        threads.start([claim(1)], version=0)
        _, group = next_events(threads, 2)
    assert isinstance(group, GroupInFlight)
    assert "engine's thread has ended" in group.traceback
