"""The staleness bound, in simulated runs with workers of every speed: `admission` and `rollout_source` together."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from async_grpo.archive.rollout_state import RolloutState
from async_grpo.training.schedule import CALM_BATCHES, LARGEST_ROUND, Lookahead, Schedule
from kit.training_fakes import Bench, begun, schedule, seqs


@dataclass(frozen=True)
class World:
    """What a simulated run is made of. Times are simulated seconds."""

    B: int = 2
    K: int = 4
    per_round: int = 1  # micro steps
    per_version: int = 1
    workers: int = 2
    claim_at_most: int = 2  # groups in one batch of a worker
    straggler_share: float = 0.1  # of the batches
    straggler_s: float = 50.0
    step_s: float = 1.0  # of a micro step
    failing_share: float = 0.0  # of the groups, for good
    seed: int = 0
    rounds: int = 12

    @property
    def plan(self) -> Schedule:
        return schedule(self.B, self.K, self.per_round, self.per_version)


class Simulation:
    """TRL's loop of micro steps over a `RolloutSource`, with workers that claim, sample and take their time."""

    def __init__(self, world: World, resume_from: RolloutState | None = None, **options: Any) -> None:
        self.world = world
        self.bench = Bench(world.plan, resume_from, **options)
        self.bench.queue.on_wait = self._next_event
        self.random = random.Random(world.seed)
        self.now = 0.0
        self.idle = world.workers
        self.under_way: list[tuple[float, int, int, list[int]]] = []  # (end, tie, version, seqs)
        self.version = resume_from.step if resume_from else 0
        self.passes_done = resume_from.passes_done if resume_from else 0  # at the last optimizer step
        self.staleness: list[int] = []
        self.used: list[int] = []
        self.most_open = 0

    def run(self) -> Simulation:
        world, source = self.world, self.bench.source
        self.bench.publisher.version = self.version
        source.advance(self.version)
        begin = self.passes_done
        for micro in range(begin, begin + world.rounds * world.per_round):
            if micro % world.per_round == 0:
                self._claim()
                self.most_open = max(self.most_open, len(self.bench.queue.jobs))
                batch = source.take(self.version)
                assert len(batch) == world.B
                assert seqs(batch) == sorted(seqs(batch))
                self.staleness += [self.version - group.policy_version for group in batch]
                self.used += seqs(batch)
            self._pass_time(world.step_s)
            if (micro - begin + 1) % world.per_version == 0:
                self.version += 1
                self.passes_done = (micro + 1) % world.per_round
                self.bench.step_done(self.version)
                self._claim()
        return self

    def _claim(self) -> None:
        queue = self.bench.queue
        while self.idle and (pending := queue.unclaimed()):
            chosen = pending[: self.random.randint(1, self.world.claim_at_most)]
            asked = max(job.min_version for job in queue.claim(*chosen))
            assert asked <= self.version, "a job asks for weights that do not exist yet"
            slow = self.random.random() < self.world.straggler_share
            took = self.random.uniform(0.1, 2.0) * (self.world.straggler_s if slow else 1.0)
            heapq.heappush(self.under_way, (self.now + took, chosen[0], self.version, chosen))
            self.idle -= 1

    def _finish_one(self) -> None:
        self.now, _, version, chosen = heapq.heappop(self.under_way)
        for seq in chosen:
            if self.random.random() < self.world.failing_share:
                self.bench.queue.fail_for_good(seq)
            else:
                self.bench.queue.finish(seq, version=version)
        self.idle += 1
        self._claim()

    def _next_event(self) -> None:
        self._claim()
        assert self.under_way, "deadlock: the trainer waits, and no worker has anything to do"
        self._finish_one()

    def _pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.under_way and self.under_way[0][0] <= end:
            self._finish_one()
        self.now = end


worlds = st.builds(
    World,
    B=st.integers(1, 5),
    K=st.integers(0, 6),
    per_round=st.integers(1, 6),
    per_version=st.integers(1, 6),
    workers=st.integers(1, 5),
    claim_at_most=st.integers(1, 4),
    straggler_share=st.sampled_from([0.0, 0.1, 0.5]),
    straggler_s=st.sampled_from([5.0, 50.0]),
    step_s=st.sampled_from([0.01, 0.5, 5.0]),
    seed=st.integers(0, 2**16),
)

# A worker stalls with more groups than one round uses, all of the same version: too many would be due at once.
TOO_MANY_DUE = (
    World(B=4, K=4, workers=6, claim_at_most=4, straggler_s=20, step_s=0.01, seed=947931, rounds=25),
    World(B=4, K=1, per_version=2, claim_at_most=6, straggler_share=0.5, step_s=0.01, seed=851640, rounds=25),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(worlds)
@example(TOO_MANY_DUE[0])
@example(TOO_MANY_DUE[1])
def test_nothing_is_used_over_age_or_twice_and_nothing_is_thrown_away(world: World) -> None:
    run = Simulation(world).run()
    assert max(run.staleness) <= world.K
    assert len(set(run.used)) == len(run.used) == world.B * world.rounds
    assert run.bench.metrics.dropped == 0
    assert run.most_open <= world.plan.most_open


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds, st.sampled_from([0.05, 0.3]))
def test_groups_that_fail_for_good_do_not_break_the_bound(world: World, failing_share: float) -> None:
    many = World(**{**world.__dict__, "B": world.B + 20, "failing_share": failing_share})  # so that never all B fail
    run = Simulation(many).run()
    assert max(run.staleness) <= world.K
    assert not set(run.used) & set(run.bench.source.unusable)
    assert len(set(run.used)) == len(run.used) == many.B * many.rounds


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds)
def test_in_order_every_group_is_used_in_the_order_of_issue(world: World) -> None:
    run = Simulation(world, in_order=True).run()
    assert run.used == list(range(world.B * world.rounds))
    assert max(run.staleness) <= world.K


@settings(max_examples=60, deadline=None, derandomize=True)
@given(worlds, st.integers(0, 12))
def test_a_resumed_run_goes_on_within_the_bound(world: World, stop_after: int) -> None:
    """Also from a checkpoint in the middle of a round, of which the rest comes first."""
    first = Simulation(World(**{**world.__dict__, "rounds": stop_after + 1})).run()
    state = first.bench.source.state_at(first.version, passes_done=first.passes_done)
    second = Simulation(world, resume_from=state).run()
    assert max(second.staleness) <= world.K
    assert not set(second.used) & set(state.consumed_seqs()), "trained on twice"


@pytest.mark.parametrize("step", range(1, 8))
def test_resuming_in_the_middle_of_a_round_does_not_wait_for_weights_of_the_future(step: int) -> None:
    """Eight steps on each batch, K = 0: after the checkpoint of step 3 come five more, the next round starts at 8."""
    used: dict[str, Any] = {"next_seq": 2, "rounds": 1, "unusable": [], "consumed_below": 2, "consumed": []}
    state = RolloutState(run_id="run-1", step=step, passes_done=step, **used)
    run = Simulation(World(B=2, K=0, per_round=8), resume_from=state).run()
    assert set(run.staleness) == {0}
    assert run.bench.source._schedule.version_of_round(1) == 8


def test_fast_workers_run_ahead_only_as_far_as_the_bound_can_use() -> None:
    run = Simulation(World(B=2, K=3, workers=5, straggler_share=0.0, step_s=100.0)).run()
    assert run.most_open <= run.world.plan.groups_ahead


def test_the_version_of_a_round() -> None:
    every_step, two_steps_a_batch = schedule(B=4), schedule(per_round=4, per_version=2)
    two_batches_a_step = schedule(per_round=2, per_version=4)
    assert [every_step.version_of_round(r) for r in range(4)] == [0, 1, 2, 3]
    assert [two_steps_a_batch.version_of_round(r) for r in range(4)] == [0, 2, 4, 6]
    assert [two_batches_a_step.version_of_round(r) for r in range(5)] == [0, 0, 1, 1, 2]


@given(st.integers(1, 12), st.integers(1, 12))
def test_how_much_older_a_group_is_in_the_last_pass_of_its_round(per_round: int, per_version: int) -> None:
    plan = schedule(per_round=per_round, per_version=per_version)
    starts = range(0, 200 * per_round, per_round)
    later = [(start + per_round - 1) // per_version - start // per_version for start in starts]
    assert plan.versions_within_round == max(later)


def test_jobs_are_admitted_a_round_at_a_time() -> None:
    plan = schedule(B=3, K=2)
    admitted = [position for position in range(30) if plan.is_admissible(position, version=4, open_jobs=0)]
    assert admitted == list(range(3 * (4 + 2 + 1)))
    assert plan.is_admissible(0, version=4, open_jobs=255)
    assert not plan.is_admissible(0, version=4, open_jobs=256)


@pytest.mark.parametrize(
    ("B", "G", "most"),
    [
        (8, 16, 256),
        (8, 64, 256),
        (8, 8, 512),  # 4,096 completions
        (64, 1, LARGEST_ROUND),
        (300, 16, 600),  # two rounds
        (1024, 8, 2048),
        (3000, 16, LARGEST_ROUND),
    ],
)
def test_as_many_completions_are_open_whatever_the_size_of_groups(B: int, G: int, most: int) -> None:
    assert schedule(B=B, G=G).most_open == most


def test_a_round_of_many_small_groups_is_issued_whole_and_one_ahead() -> None:
    assert len(begun(schedule(B=1000, G=1, K=4)).queue.jobs) == 2000


def test_lookahead_grows_only_while_workers_run_dry_and_stays_within_its_bounds() -> None:
    lookahead = Lookahead(groups_per_round=8, most=40)
    assert lookahead.groups == 16
    for _ in range(10):
        lookahead.batch_taken(starved=True)
    assert lookahead.groups == 40
    for _ in range(100):
        lookahead.batch_taken(starved=False)
    assert lookahead.groups == 16


def test_lookahead_shrinks_by_whole_rounds_and_only_after_some_calm() -> None:
    lookahead = Lookahead(groups_per_round=8, most=40)
    lookahead.batch_taken(starved=True)
    seen = []
    for starved in [*[False] * (CALM_BATCHES - 1), True, *[False] * (2 * CALM_BATCHES)]:
        lookahead.batch_taken(starved=starved)
        seen.append(lookahead.groups)
    assert seen == [24] * (CALM_BATCHES - 1) + [32] * CALM_BATCHES + [24] * CALM_BATCHES + [16]


@given(st.integers(1, 10), st.integers(0, 6), st.integers(1, 6), st.integers(1, 6), st.lists(st.booleans()))
def test_lookahead_always_leaves_room_for_one_batch(B: int, K: int, per_round: int, per_version: int, starved) -> None:
    plan = schedule(B, K, per_round, per_version)
    lookahead = Lookahead(B, plan.groups_ahead)
    for dry in starved:
        lookahead.batch_taken(starved=dry)
        assert B <= lookahead.groups <= max(B, plan.groups_ahead)
