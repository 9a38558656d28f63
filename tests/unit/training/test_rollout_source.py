"""What the trainer gets, when, and in which order, from a queue in memory whose workers the test plays."""

from __future__ import annotations

from typing import Any

import pytest

from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import AllGroupsFailedError, WaitTimeoutError
from async_grpo.training.job_issuer import sampling_seed
from async_grpo.training.rollout_source import StopTraining
from kit.training_fakes import RUN, Bench, begun, schedule, seqs


def consumed(bench: Bench) -> list[int]:
    return sorted(bench.source.state_at(0, passes_done=0).consumed_seqs())


def resumed(**changes: Any) -> RolloutState:
    given = {"run_id": RUN, "step": 2, "next_seq": 8, "rounds": 2, "unusable": [], "consumed_below": 4, "consumed": []}
    return RolloutState(**{**given, **changes})


def test_jobs_carry_the_row_the_seed_and_the_version_that_they_need() -> None:
    bench = begun(schedule(B=2, K=1), seed=7)
    first, last = bench.queue.jobs[0], bench.queue.jobs[3]
    assert (first.row, first.num_generations, first.run_id) == ({"n": 0}, 2, RUN)
    assert first.seed == sampling_seed(7, 0) != last.seed == sampling_seed(7, 3)
    assert (last.born_version, last.min_version) == (0, 0)
    bench.use(0, 1, version=0)
    bench.source.advance(1)
    later = bench.queue.jobs[4]
    assert (later.born_version, later.min_version) == (1, 1), "for round 2, one version old"


def test_without_staleness_one_batch_is_under_way_and_the_next_is_issued_after_the_step() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.finish(0, 1, version=0)
    assert seqs(bench.source.take(0)) == [0, 1]
    bench.source.advance(0)
    assert bench.queue.submitted == [0, 1]
    bench.step_done(1)
    assert bench.queue.submitted == [0, 1, 2, 3]
    assert bench.queue.jobs[2].min_version == 1


PARTS = {"B": 2, "K": 0, "per_round": 1, "per_version": 3}  # three rounds of two groups to a step


@pytest.mark.parametrize(
    ("options", "finished", "taken"), [({}, [5, 3], [3, 5]), ({"in_order": True}, [5, 3, 1, 0], [0, 1])]
)
def test_a_part_of_a_step_begins_with_the_groups_that_are_there_while_others_are_generated(
    options: dict[str, bool], finished: list[int], taken: list[int]
) -> None:
    bench = begun(schedule(**PARTS), **options)
    assert bench.queue.submitted == [0, 1, 2, 3, 4, 5], "all of the step at once"
    bench.queue.claim(*bench.queue.submitted)
    arriving = iter(finished)
    bench.queue.on_wait = lambda: bench.queue.finish(next(arriving), version=0)
    assert seqs(bench.source.take(0)) == taken
    assert bench.queue.waits == len(finished)
    bench.queue.finish(*sorted(bench.queue.claimed), version=0)
    assert sorted([*seqs(bench.source.take(0)), *seqs(bench.source.take(0)), *taken]) == [0, 1, 2, 3, 4, 5]
    assert bench.queue.submitted == [0, 1, 2, 3, 4, 5], "none of the next version before the step"
    bench.step_done(1)
    assert [bench.queue.jobs[seq].min_version for seq in range(6, 12)] == [1] * 6


def test_parts_of_a_step_that_did_not_end_are_taken_again_by_the_run_that_resumes() -> None:
    bench = begun(schedule(**PARTS))
    bench.queue.finish(*range(6), version=0)
    for _ in range(3):
        bench.source.take(0)
    bench.step_done(1)
    bench.queue.finish(8, 10, version=1)
    assert seqs(bench.source.take(1)) == [8, 10]
    bench.stopping = True
    bench.queue.on_wait = lambda: None
    with pytest.raises(StopTraining):
        bench.source.take(1)
    state = bench.source.state_at(1, passes_done=0)
    assert list(state.consumed_seqs()) == [0, 1, 2, 3, 4, 5] and state.rounds == 3
    again = Bench(schedule(**PARTS), resume_from=state)
    again.publisher.version = 1
    again.source.advance(1)
    assert again.queue.submitted == [6, 7, 8, 9, 10, 11]


def test_a_smaller_step_at_the_end_of_each_epoch_costs_no_more_than_what_was_issued_for_it() -> None:
    """Seven rounds an epoch, three a step: transformers takes the last one alone."""
    bench = Bench(schedule(**PARTS))
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed(), version=bench.publisher.version)
    dropped = []
    for version in range(12):
        for _ in range((3, 3, 1)[version % 3]):
            assert {group.policy_version for group in bench.source.take(version)} == {version}
        bench.source.trained()
        bench.publisher.version = version + 1
        dropped.append(len(bench.history.left_out))
    assert dropped == [0, 0, 0, 4, 4, 4, 8, 8, 8, 12, 12, 12]


@pytest.mark.parametrize("K", [0, 1])
@pytest.mark.parametrize(("B", "per_round", "per_version"), [(2, 1, 4), (4, 2, 4), (8, 4, 4), (16, 8, 4)])
def test_a_resume_with_rounds_of_another_size_issues_as_many_as_the_bound_admits(
    B: int, per_round: int, per_version: int, K: int
) -> None:
    """Two rounds of eight were used: where positions counted in new rounds from 0, no job would ever be admissible."""
    state = resumed(next_seq=16, rounds=2, consumed_below=16)
    bench = Bench(schedule(B=B, K=K, per_round=per_round, per_version=per_version), resume_from=state, in_order=True)
    bench.source.advance(2)
    assert bench.queue.submitted == list(range(16, 16 + max(B, 8 * (K + 1) // B * B)))


@pytest.mark.parametrize("K", [0, 2])
def test_a_trainer_that_takes_several_batches_for_one_step_gets_them(K: int) -> None:
    """As a `_prepare_inputs` does that samples until something holds; without a stall, and within the bound."""
    bench = begun(schedule(B=2, K=K))
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed()[:2], version=bench.publisher.version)
    for version in range(3):
        for _ in range(K + 4):
            batch = bench.source.take(version)
            assert all(group.policy_version >= version - K for group in batch)
        bench.step_done(version + 1)


def test_the_log_of_decisions_says_why_a_batch_is_not_complete(decisions: list[str]) -> None:
    bench = begun(schedule(B=2, K=4))
    bench.queue.finish(0, version=0)
    bench.queue.on_wait = lambda: bench.queue.finish(1, version=0)
    bench.source.take(0)
    assert "the batch of version 0 is not complete: 1 groups are there for 2; under way: [1, 2, 3]" in decisions
    assert any(line.startswith("group 1 came back, of version 0 from ") for line in decisions)


def test_groups_of_older_weights_go_before_those_of_newer_ones() -> None:
    bench = begun(schedule(B=2, K=4))
    bench.queue.claim(*range(4))
    assert seqs(bench.use(2, 3, version=0)) == [2, 3]
    bench.queue.claim(4, 5)
    bench.queue.finish(0, version=1)
    bench.queue.finish(4, 5, version=0)
    assert seqs(bench.source.take(1)) == [4, 5]


def test_a_straggler_delays_only_itself() -> None:
    bench = begun(schedule(B=2, K=4))
    bench.queue.claim(0)  # and its worker is slow
    for version in range(4):
        bench.queue.finish(*bench.queue.unclaimed()[:2], version=version)
        assert 0 not in seqs(bench.source.take(version))
        bench.step_done(version + 1)
    assert bench.queue.waits == 0


def test_a_group_that_cannot_be_used_later_is_waited_for() -> None:
    bench = begun(schedule(B=2, K=1))
    bench.queue.claim(0, 1)
    assert seqs(bench.use(2, 3, version=0)) == [2, 3]  # groups 0 and 1 have one more round, version 1
    bench.queue.finish(4, 5, version=1)
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.claimed, version=0)
    assert seqs(bench.source.take(1)) == [0, 1]
    assert bench.queue.waits == 1
    bench.step_done(2)
    assert seqs(bench.source.take(2)) == [4, 5]


def test_what_nobody_has_claimed_is_never_waited_for_out_of_turn() -> None:
    """A pending job will be sampled by the newest weights, so it is not old, however long it lies there."""
    bench = begun(schedule(B=1, K=1))
    assert seqs(bench.use(1, version=0)) == [1]
    bench.queue.finish(2, version=1)
    assert seqs(bench.source.take(1)) == [2]
    assert (bench.queue.waits, bench.queue.unclaimed()[0]) == (0, 0)


def test_a_quarantined_group_is_replaced_by_a_new_job() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.finish(0, version=0)
    bench.queue.fail_for_good(1)

    bench.queue.on_wait = lambda: bench.queue.finish(2, version=0)
    assert seqs(bench.source.take(0)) == [0, 2]
    assert (bench.source.unusable, bench.metrics.quarantined) == ([1], 1)
    bench.step_done(1)
    assert (consumed(bench), bench.queue.unclaimed()) == ([0, 2], [3, 4])


def test_a_group_that_an_operator_tried_once_more_is_used_and_no_checkpoint_before_counts_it() -> None:
    bench = begun(schedule(B=2, K=4))
    job = bench.queue.jobs[0]
    bench.queue.fail_for_good(0)
    bench.use(1, 2, version=0)
    state = bench.source.state_at(1, passes_done=0)
    assert (state.consumed_below, state.unusable) == (3, [0])
    del bench.queue.given_up[0]
    bench.queue.jobs[0] = job
    bench.queue.finish(0, 3, version=0)
    batch = bench.source.take(1)
    assert consumed(bench) == [1, 2]
    assert (seqs(batch), bench.source.unusable) == ([0, 3], [])
    bench.step_done(2)
    assert consumed(bench) == [0, 1, 2, 3]


def test_room_is_made_for_workers_that_find_none() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.workers_lack_room = True

    def work_where_there_is_room() -> None:
        if bench.archive.asked:
            bench.queue.workers_lack_room = False
            bench.queue.finish(*bench.queue.unclaimed(), version=0)

    bench.queue.on_wait = work_where_there_is_room
    assert len(bench.source.take(0)) == 2
    assert bench.archive.asked == 1


def test_a_full_disk_holds_jobs_back_and_loses_none() -> None:
    bench = Bench(schedule(B=2, K=0))
    bench.queue.disk_full = True
    bench.source.advance(0)
    bench.source.advance(0)
    assert bench.queue.submitted == []
    assert bench.archive.asked == 1, "once, and not at every look"

    def room_again() -> None:
        if bench.queue.disk_full:
            bench.queue.disk_full = False
        else:
            bench.queue.finish(*bench.queue.unclaimed(), version=0)

    bench.queue.on_wait = room_again
    assert seqs(bench.source.take(0)) == [0, 1]
    assert bench.queue.submitted == [0, 1]


def test_finished_groups_wait_for_room_in_the_archive() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.finish(0, 1, version=0)
    bench.queue.disk_full = True
    bench.queue.on_wait = lambda: setattr(bench.queue, "disk_full", False)
    assert seqs(bench.source.take(0)) == [0, 1]


def test_a_wait_for_room_on_the_disk_says_so() -> None:
    bench = Bench(schedule(B=2, K=0), max_wait_s=-1.0)
    bench.queue.disk_full = True
    with pytest.raises(WaitTimeoutError, match="for room on the disk for new jobs"):
        bench.source.take(0)


def test_groups_that_teach_nothing_are_replaced_until_the_batch_is_full() -> None:
    bench = begun(schedule(B=2, K=0), is_uniform=lambda group: group.job.seq in (0, 2))
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed(), version=0)
    assert seqs(bench.source.take(0)) == [1, 3]
    assert bench.source.unusable == [0, 2]
    assert bench.history.left_out == [(0, "equal rewards"), (2, "equal rewards")]


def test_when_no_group_teaches_anything_they_are_used_all_the_same() -> None:
    bench = begun(schedule(B=2, K=0), is_uniform=lambda group: True)
    bench.queue.on_wait = lambda: bench.queue.finish(*bench.queue.unclaimed(), version=0)
    assert len(bench.source.take(0)) == 2


def test_groups_that_came_back_and_teach_nothing_are_no_failures() -> None:
    bench = begun(schedule(B=1, K=0), is_uniform=lambda group: group.job.seq < 21)

    def serve() -> None:
        [seq] = bench.queue.unclaimed()
        bench.queue.fail_for_good(seq) if seq % 2 else bench.queue.finish(seq, version=0)

    bench.queue.on_wait = serve
    assert len(bench.source.take(0)) == 1
    assert bench.metrics.quarantined >= 8


def test_finishing_what_is_open_leaves_it_for_the_next_batch() -> None:
    bench = begun(schedule(B=2, K=4))
    bench.queue.fail_for_good(3)
    bench.queue.on_wait = lambda: bench.queue.finish(bench.queue.unclaimed()[0], version=0)
    assert bench.source.finish_open(0)
    assert (bench.queue.unclaimed(), bench.queue.submitted) == ([], [0, 1, 2, 3]), "and nothing new was issued"
    waits = bench.queue.waits
    assert (seqs(bench.source.take(0)), bench.queue.waits) == ([0, 1], waits)


def test_after_a_stop_what_is_open_is_finished_while_there_is_time_and_a_worker() -> None:
    bench = begun(schedule(B=2, K=4), finish_s=3600.0)

    def serve() -> None:
        bench.stopping = True
        bench.queue.finish(bench.queue.unclaimed()[0], version=0)

    bench.queue.on_wait = serve
    assert bench.source.finish_open(0)
    assert bench.queue.unclaimed() == []


def test_after_a_stop_nobody_waits_for_workers_that_have_ended() -> None:
    bench = begun(schedule(B=2, K=4), finish_s=3600.0)
    bench.queue.on_wait = lambda: (setattr(bench, "stopping", True), setattr(bench.queue, "alive", 0))
    assert not bench.source.finish_open(0)


def test_a_stop_ends_the_wait_but_not_a_batch_that_is_there() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.on_wait = lambda: setattr(bench, "stopping", True)
    with pytest.raises(StopTraining):
        bench.source.take(0)
    bench.queue.finish(0, 1, version=0)
    assert seqs(bench.source.take(0)) == [0, 1]


@pytest.mark.parametrize(
    ("alive", "subject"),
    [(0, "no worker is alive: start one with `async-grpo worker`"), (3, r"from 3 workers \(1 pending, 1 in process\)")],
)
def test_a_wait_has_a_deadline_and_says_what_it_waited_for(alive: int, subject: str) -> None:
    bench = Bench(schedule(B=2, K=0), max_wait_s=-1.0)  # over before it began
    bench.queue.alive = alive
    bench.source.advance(0)
    bench.queue.claim(0)
    with pytest.raises(WaitTimeoutError, match=rf"Timed out after .* waiting for 2 .*{subject}"):
        bench.source.take(0)


def test_a_version_that_could_not_be_published_is_tried_again_before_and_during_each_wait() -> None:
    bench = begun(schedule(B=2, K=0))
    bench.queue.on_wait = lambda: bench.queue.finish(bench.queue.unclaimed()[0], version=0)
    bench.source.take(0)
    assert bench.queue.waits == 2
    assert bench.publisher.retries == 1 + 2


def test_a_batch_counts_as_consumed_only_after_its_optimizer_step() -> None:
    bench = Bench(schedule(B=2, K=4, per_round=1, per_version=2))  # two batches a step
    bench.source.advance(0)
    for _ in range(2):
        bench.queue.finish(*bench.queue.unclaimed()[:2], version=0)
        bench.source.take(0)
        assert (consumed(bench), bench.source.rounds) == ([], 0)
    bench.step_done(1)
    assert (consumed(bench), bench.source.rounds) == ([0, 1, 2, 3], 2)


def test_starved_workers_widen_the_lookahead() -> None:
    bench = begun(schedule(B=2, K=4))
    bench.queue.claim(*range(4))  # nothing is left for another worker, and the trainer waits
    bench.queue.on_wait = lambda: bench.queue.finish(0, 1, version=0)
    bench.source.take(0)
    bench.step_done(1)
    assert len(bench.queue.jobs) == 6


def test_resuming_issues_exactly_what_the_checkpoint_does_not_have() -> None:
    bench = Bench(schedule(B=2, K=4), resume_from=resumed(consumed_below=3, consumed=[5], unusable=[1, 6]))
    assert consumed(bench) == [0, 2, 5]
    bench.source.advance(2)
    assert (bench.queue.submitted, bench.source.rounds) == ([3, 4, 7, 8], 2)
    assert bench.queue.jobs[7].row == {"n": 7}, "the rows of consumed jobs are skipped too"


def test_groups_from_before_the_interruption_that_are_over_age_are_dropped_and_replaced() -> None:
    bench = Bench(schedule(B=2, K=1), resume_from=resumed())
    bench.publisher.version = 2
    bench.source.advance(2)
    bench.queue.finish(4, version=0)
    bench.queue.finish(5, 6, version=2)
    assert seqs(bench.source.take(2)) == [5, 6]
    assert (bench.metrics.dropped, bench.source.unusable, bench.history.left_out) == (1, [4], [(4, "over age")])
    bench.step_done(3)
    assert 4 not in bench.queue.jobs


def test_the_sampling_seed_depends_on_run_and_group_and_is_what_torch_takes() -> None:
    seeds = {sampling_seed(run, seq) for run in range(20) for seq in range(50)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(3, 14) == sampling_seed(3, 14)


def test_a_deterministic_run_says_where_another_version_had_to_sample(warnings: list[str]) -> None:
    """Groups 2 to 5 were finished at the checkpoint; the file of group 5 was gone when the run was resumed."""
    first = begun(schedule(B=2, K=1), in_order=True)
    first.use(0, 1, 2, 3, version=0)
    first.queue.finish(4, 5, version=1)
    assert first.source.finish_open(1)
    state = first.source.state_at(1, passes_done=0)
    assert state.waiting == [(2, 0), (3, 0), (4, 1), (5, 1)]

    again = Bench(schedule(B=2, K=1), resume_from=state, in_order=True)
    again.source.advance(1)
    again.queue.finish(2, 3, version=0)
    again.source.take(1)
    again.step_done(2)
    again.queue.finish(4, version=1)
    assert not warnings
    again.queue.finish(5, version=2)
    again.source.take(2)
    [warning] = warnings
    assert "group 5 was lost. Version 1 sampled it, whose weights are no more, and now version 2" in warning


def test_only_a_deterministic_run_says_what_waits() -> None:
    bench = begun(schedule(B=2, K=1))
    bench.queue.finish(0, 1, 2, version=0)
    bench.source.take(0)
    assert bench.source.state_at(0, passes_done=0).waiting == []


# --- Groups that fail: -------------------------------------------------------------------------------------------


def test_when_nothing_but_failures_comes_back_the_traceback_is_in_the_error() -> None:
    bench = begun(schedule(B=4, K=4))
    reason = "Traceback (most recent call last):\n  File 'rewards.py', line 3\nValueError: no number"

    bench.queue.on_wait = lambda: bench.queue.fail_for_good(*bench.queue.unclaimed(), reason=reason)
    with pytest.raises(AllGroupsFailedError, match=r"prompt groups all failed(.|\n)*rewards\.py(.|\n)*no number"):
        bench.source.take(0)


@pytest.mark.parametrize(("B", "finished", "ends_at"), [(1, [], None), (2, [0], 1)], ids=["tiny batches", "at the end"])
def test_one_poisoned_prompt_is_replaced(B: int, finished: list[int], ends_at: int | None) -> None:
    bench = Bench(schedule(B=B, K=0))
    bench.source.ends_at = ends_at
    bench.source.advance(0)
    bench.queue.finish(*finished, version=0)
    bench.queue.fail_for_good(B - 1)
    bench.queue.on_wait = lambda: bench.queue.finish(B, version=0)
    assert seqs(bench.source.take(0)) == [*finished, B]


def test_some_failures_between_successes_do_not_end_the_run() -> None:
    bench = Bench(schedule(B=4, K=0))
    for version in range(20):
        bench.source.advance(version)
        bench.queue.fail_for_good(bench.queue.unclaimed()[0])
        bench.queue.on_wait = lambda version=version: bench.queue.finish(*bench.queue.unclaimed(), version=version)
        assert len(bench.source.take(version)) == 4
        bench.step_done(version + 1)
    assert bench.metrics.quarantined == 20
