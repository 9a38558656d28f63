"""Groups on their way through TRL, with a trainer that only asks for tokens and an engine played by the test."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.records import Job
from async_grpo.rollout.trl_group import GroupOutcome
from async_grpo.rollout.turns.groups import Turns, noted
from async_grpo.setup.generator_choice import HF, VLLM
from async_grpo.tokens import Tokens, as_tokens
from kit.engines import DEADLINE_S, job
from kit.worker_fakes import made

Code = Callable[[Any, Any], Any]  # what a group does: (sample, row) -> its group


class FakeTRL:
    """Runs the test's code in place of TRL's, as a whole."""

    goes_by_turns = False
    tools: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, code: Code, *, environments: bool = False) -> None:
        self.code = code
        self.trainer = SimpleNamespace(environment_factories=environments or None, rollout_func=None)
        self.forks = 0

    def fork(self) -> FakeTRL:
        self.forks += 1
        return copy.copy(self)

    def generate(self, jobs: Sequence[Job], version: int, sample: Any) -> list[Any]:
        return [Made(self.code(sample, job.row), version) for job in jobs]

    def sampling_of(self, job: Job) -> dict[str, Any]:
        return job.sampling


@dataclass
class Made:
    tokens: Any
    version: int
    let_go: Any = None


class PlayedEngine:
    """Completes each turn when the test says so; at once where it says nothing."""

    most_groups = 8

    def __init__(self, *, joins: bool = True, at_once: bool = True) -> None:
        self.capabilities, self.at_once = VLLM if joins else HF, at_once
        self.turns: list[PreparedGroup] = []  # that wait
        self.batches: list[int] = []  # turns that came together
        self.seen: list[PreparedGroup] = []
        self.done: list[SampledGroup] = []
        self.closed = False

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        if new:
            self.batches.append(len(new))
        self.turns += new
        self.seen += new
        if self.at_once:
            for turn in list(self.turns):
                self.complete(turn)
        done, self.done = self.done, []
        return done

    def complete(self, turn: PreparedGroup, error: Exception | None = None) -> None:
        self.turns.remove(turn)
        ids = [[prompt[0] + 100] for prompt in turn.prompt_ids]
        logprobs = [[-1.0] for _ in ids]
        self.done.append(SampledGroup(prepared=turn, tokens=as_tokens(ids, logprobs), error=error))

    def follow(self, weights: Any) -> Any: ...

    def close(self) -> None:
        self.closed = True


def one_turn(sample: Any, row: Any) -> Any:
    return sample([[row], [row + 1]])


def turns_of(code: Code, engine: PlayedEngine | None = None, **options: bool) -> Turns:
    return Turns(FakeTRL(code, **options), engine or PlayedEngine())  # type: ignore[arg-type]


def waiting(code: Code, engine: PlayedEngine, rows: Sequence[Any], turns: int, version: int = 0) -> Turns:
    """Groups of these rows, once so many turns wait for their tokens."""
    begun = turns_of(code, engine)
    found = started(begun, rows, version)
    step_until(begun, lambda: len(engine.turns) == turns, found)
    assert not found
    return begun


def completed(turns: Turns, engine: PlayedEngine, error: Exception | None = None) -> list[Any]:
    """The outcomes of all that waits."""
    found: list[Any] = []
    wanted = len(engine.turns)
    for turn in list(engine.turns):
        engine.complete(turn, error)
    step_until(turns, lambda: len(found) == wanted, found)
    return found


def started(turns: Turns, rows: Sequence[Any], version: int = 0) -> list[GroupOutcome]:
    """Start a job for each row; returns what has ended at once."""
    turns.start([job(seq, row=row) for seq, row in enumerate(rows)], version)
    return turns.step()


def ended(turns: Turns, rows: Sequence[Any], wanted: int | None = None) -> dict[Any, Any]:
    """Start a job for each row and return those that have ended, once there are enough, by row."""
    found = started(turns, rows)
    step_until(turns, lambda: len(found) >= (len(rows) if wanted is None else wanted), found)
    return {outcome.job.row: outcome for outcome in found}  # type: ignore[misc]


def step_until(turns: Turns, condition: Callable[[], bool], found: list[SampledGroup]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        found += turns.step()


def text(sampled: GroupOutcome) -> str:
    return str(sampled.error)


both = pytest.mark.parametrize("joins", [True, False], ids=["a thread each", "one for all"])


@both
def test_a_group_waits_for_its_tokens_and_gets_them(joins: bool) -> None:
    engine = PlayedEngine(joins=joins, at_once=False)
    turns = waiting(one_turn, engine, [10], turns=1, version=3)
    [asked] = engine.turns
    assert (asked.prompt_ids, asked.version, asked.turn) == ([[10], [11]], 3, 0)
    assert turns.step() == []
    [outcome] = completed(turns, engine)
    assert outcome.group.tokens == ([[110], [111]], [[-1.0], [-1.0]])


def test_turns_are_numbered_and_seeded_each() -> None:
    def three(sample: Any, row: Any) -> Any:
        return [sample([[row]]) for _ in range(3)]

    engine = PlayedEngine()
    ended(turns_of(three, engine), [10])
    assert [turn.turn for turn in engine.seen] == [0, 1, 2]
    assert len({turn.seed for turn in engine.seen}) == 3


def test_groups_wait_side_by_side_and_copies_are_used_again() -> None:
    engine = PlayedEngine(at_once=False)
    turns = waiting(one_turn, engine, [10, 20], turns=2)
    trl: Any = turns._trl
    assert trl.forks == 1
    completed(turns, engine)
    engine.at_once = True
    ended(turns, [30])
    assert trl.forks == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_code_that_wants_to_end_the_process_costs_one_group(error: BaseException) -> None:
    """`__init__` of an environment, for one: TRL's trainer is copied on the event loop."""
    turns = turns_of(one_turn)
    turns._trl.fork = Mock(side_effect=error)
    groups = ended(turns, [10, 20])
    assert text(groups[20]) == f"{type(error).__name__}: {error}"
    assert groups[10].error is None


def test_groups_of_a_batch_engine_go_through_trl_together() -> None:
    calls: list[int] = []
    turns = turns_of(one_turn, PlayedEngine(joins=False))
    trl: Any = turns._trl
    generate = trl.generate
    trl.generate = lambda jobs, *rest: calls.append(len(jobs)) or generate(jobs, *rest)
    groups = ended(turns, [10, 20, 30])
    assert calls == [3]
    made = [groups[row].group for row in (10, 20, 30)]
    assert [group.tokens[0] for group in made] == [[[row + 100], [row + 101]] for row in (10, 20, 30)]  # type: ignore[attr-defined]


@both
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_error_costs_one_group_of_those_that_go_together(joins: bool, when: str) -> None:
    def code(sample: Any, row: int) -> Any:
        if when == "before" and row == 20:
            raise RuntimeError("the tool broke")
        made = one_turn(sample, row)
        if row == 20:
            raise RuntimeError("the tool broke")
        return made

    groups = ended(turns_of(code, PlayedEngine(joins=joins)), [10, 20, 30])
    assert {row: group.error is None for row, group in groups.items()} == {10: True, 20: False, 30: True}
    assert "the tool broke" in text(groups[20])


def test_only_one_group_runs_code_at_a_time() -> None:
    running: list[int] = []
    most: list[int] = []

    def code(sample: Any, row: int) -> Any:
        for _ in range(20):
            running.append(row)
            most.append(len(running))
            threading.Event().wait(0.001)
            running.remove(row)
        return sample([[row]])

    ended(turns_of(code), list(range(4)))
    assert max(most) == 1


@both
def test_an_error_of_the_engine_reaches_the_group(joins: bool) -> None:
    engine = PlayedEngine(joins=joins, at_once=False)
    turns = waiting(one_turn, engine, [1], turns=1)
    [outcome] = completed(turns, engine, error=ValueError("the prompt is too long"))
    assert "the prompt is too long" in text(outcome)


def test_environments_are_used_again_once_their_group_is_scored() -> None:
    turns = turns_of(one_turn, environments=True)
    trl: Any = turns._trl
    made = [ended(turns, [row])[row].group for row in (10, 20)]
    assert trl.forks == 2, "the first group's environments are still in use"
    assert [group.tokens[0][0] for group in made] == [[110], [120]]
    for group in made:
        group.let_go()
    ended(turns, [30])
    assert trl.forks == 2


def test_closing_ends_what_waits_for_tokens() -> None:
    engine = PlayedEngine(at_once=False)
    outcomes: list[str] = []

    def code(sample: Any, row: Any) -> Any:
        try:
            return one_turn(sample, row)
        except Exception as error:
            outcomes.append(str(error))
            raise

    waiting(code, engine, [10, 20], turns=2).close()
    assert engine.closed
    assert outcomes == ["Nobody waits for this group any more."] * 2


def test_closing_starts_no_code_again() -> None:
    """Groups that go together are tried alone after an error, but the end of the worker is none of theirs."""
    begun: list[int] = []
    engine = PlayedEngine(joins=False, at_once=False)

    def code(sample: Any, row: int) -> Any:
        begun.append(row)
        return one_turn(sample, row)

    waiting(code, engine, [10, 20], turns=1).close()
    assert begun == [10]


def test_what_was_dropped_costs_nothing_and_the_next_groups_are_sampled() -> None:
    """As when the weights of the groups in flight were lost: the worker hands their jobs back and goes on."""
    engine = PlayedEngine(at_once=False)
    turns = waiting(one_turn, engine, [10, 20], turns=2)
    turns.close()
    engine.turns.clear()
    engine.at_once = True
    assert set(ended(turns, [30])) == {30}
    assert turns.step() == []


def test_environments_of_groups_that_are_dropped_when_they_have_just_ended_are_free_again() -> None:
    """They will not be scored; an engine that samples nothing beside them would never get another group."""
    turns = turns_of(one_turn, PlayedEngine(joins=False), environments=True)
    dropped = ended(turns, [10, 20])
    assert turns.most_groups == 0
    turns.close()
    for outcome in dropped.values():
        outcome.group.let_go()
    assert turns.most_groups == PlayedEngine.most_groups
    assert set(ended(turns, [30])) == {30}
    assert turns._trl.forks == 1, "the copies are used again"  # type: ignore[attr-defined]


def sampled_turn(prompts: list[list[int]], ids: list[list[int]], versions: list[list[int]]) -> SampledGroup:
    turn = PreparedGroup(job=job(), version=0, prompt_ids=prompts)
    tokens = [Tokens(row, versions=of_row) for row, of_row in zip(ids, versions, strict=True)]
    return SampledGroup(prepared=turn, tokens=tokens)


def test_every_token_knows_its_version_through_a_tool_loop() -> None:
    prompt = [1, 2]
    # The second row calls a tool, which writes 90; the third does, too, and is cut to its limit.
    ids = [[10, 11], [20, 90, 21, 22], [30, 90, 31]]
    group = made(job(row={"ids": prompt}, size=3), 0, ids, None)
    first = sampled_turn([prompt] * 3, [[10, 11], [20], [30]], [[4, 5], [4], [4]])
    second = sampled_turn([[1, 2, 20, 90], [1, 2, 30, 90]], [[21, 22], [31, 32]], [[5, 6], [6, 7]])
    tokens = noted(group, [first, second]).tokens
    assert [row.versions for row in tokens] == [[4, 5], [4, 4, 5, 6], [4, 4, 6]]
    assert [row.ids for row in tokens] == ids


def test_a_group_that_waits_says_who_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.rollout.turns.groups.LOOK_S", 0.01)
    turns = turns_of(one_turn, PlayedEngine(at_once=False))
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    turns._whole._worker_thread = gone
    assert "worker's thread has ended" in text(ended(turns, [1])[1])
