"""The loop of a worker, with an engine that writes one token a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from async_grpo.engines import SampledGroup
from async_grpo.errors import DiskFullError, RunRefused, UnsupportedError, WaitTimeoutError
from async_grpo.queue import Claim
from async_grpo.queue.codec import encode_group
from async_grpo.records import RolloutGroup
from async_grpo.rollout.trl_group import GeneratedGroup, Scores, rows_of
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.telemetry.activity import activity
from async_grpo_ipc import ExporterDiedError
from kit.worker_fakes import ENDLESS, LONG, REWRITTEN, TOKENS, FakeEngine, Setting, job


@pytest.fixture(autouse=True, params=["whole", "in threads"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose tokens are sampled in one go, and groups that wait for them in threads."""
    monkeypatch.setattr(Setting, "samples_whole", request.param == "whole")
    for pause in ("LOOK_S", "RUN_LOOK_S"):
        monkeypatch.setattr(f"async_grpo.rollout.worker.{pause}", 0.0)


def publish(setting: Setting, versions: dict[int, int]) -> None:
    """Let each version be published before that step of the engine."""

    def before_step(step: int) -> None:
        setting.weights.version = versions.get(step, setting.weights.version)

    setting.engine.before_step = before_step


def test_groups_are_in_flight_together_and_each_comes_back(tmp_path: Path) -> None:
    jobs = [job(0, tokens=ENDLESS), *(job(seq, tokens=LONG if seq < 4 else TOKENS) for seq in range(1, 7))]
    setting = Setting(tmp_path, jobs, FakeEngine())
    setting.engine.before_step = lambda step: setting.end_long_ones(when_done=6, in_flight=8)
    groups = setting.run()
    assert sorted(groups) == list(range(7))
    assert setting.engine.most == 8, "four groups of two fit into the engine's batch"
    assert setting.queue.completed[-1].job.seq == 0, "the long one held nobody up"
    assert (groups[6].completion_lengths.tolist(), groups[6].token_versions) == ([TOKENS, TOKENS], None)
    assert groups[0].timings.generate_s > 0


def test_the_log_of_decisions_says_what_was_claimed_adopted_and_handed_in(tmp_path: Path, decisions: list[str]) -> None:
    """For `--log-level DEBUG`: what a person asks about at night."""
    Setting(tmp_path, [job(0)], FakeEngine()).run()
    said = ["claimed jobs 0 (try 1)", "version 0 is adopted, after None", "group 0 of version 0 is handed in"]
    assert [line for line in decisions if line.startswith(("claimed", "version", "group"))] == said


def test_off_drains_before_new_weights_and_takes_no_job_meanwhile(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=30), job(1), *(job(seq) for seq in range(2, 8))], FakeEngine())

    publish(setting, {3: 1})
    groups = setting.run()
    assert [version for version, _ in setting.engine.loads] == [0, 1]
    assert [groups[seq].policy_version for seq in range(8)] == [0] * 4 + [1] * 4
    for group in groups.values():
        assert set(group.completion_ids.tolist()) == {group.policy_version}


def test_on_goes_on_with_new_weights_and_every_token_knows_its_version(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=20)], FakeEngine(delta=True), in_flight_update=True)

    publish(setting, {5: 1, 10: 2, 15: 3})
    group = setting.run()[0]
    assert group.policy_version == 0, "the oldest"
    assert group.token_versions.tolist() == group.completion_ids.tolist(), "the engine writes its version"
    assert set(group.token_versions.tolist()) == {0, 1, 2, 3}


def refused_by_the_engine(setting: Setting) -> None:
    setting.queue.waiting[1] = job(1, tokens=-1)


def not_finished_by_trl(setting: Setting) -> None:
    if not setting.trl.samples_whole:
        pytest.skip("finished by TRL in the middle of its function")

    def fail(sampled: SampledGroup) -> None:
        if sampled.prepared.job.seq == 1:
            raise RuntimeError("no such text")

    setting.trl.before_finish = fail


def scored(otherwise: Callable[[GeneratedGroup], object]) -> Callable[[Setting], None]:
    """Score group 1 otherwise, and let the queue write the bytes of what comes back, as the real one does."""

    def change(setting: Setting) -> None:
        complete, score = setting.queue.complete, setting.trl.score
        setting.queue.complete = lambda claim, group: [encode_group(group), complete(claim, group)]
        setting.trl.score = lambda groups: [
            (group.job.seq == 1 and otherwise(group)) or score([group])[0] for group in groups
        ]

    return change


def with_gradient(group: GeneratedGroup) -> Scores:
    return Scores(names=("reward",), rewards=torch.zeros(2, 1, requires_grad=True), metrics={}, extra_columns={})


def last_logprob(unknown: Any) -> Callable[[GeneratedGroup], None]:
    """As an engine may have it."""
    return lambda group: group.tokens[1].logprobs.__setitem__(-1, unknown)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (refused_by_the_engine, "the prompt is too long"),
        (not_finished_by_trl, "no such text"),
        (scored(with_gradient), "Group 1 cannot be written"),
        *((scored(last_logprob(unknown)), "Group 1 cannot be written") for unknown in (None, math.nan, -math.inf)),
    ],
)
def test_a_group_that_fails_costs_no_other(change: Callable[[Setting], None], said: str, tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1), job(2)], FakeEngine())
    change(setting)
    assert sorted(setting.run()) == [0, 2]
    ((seq, error),) = setting.queue.failed
    assert seq == 1 and said in error


def test_a_completion_that_does_not_continue_its_prompts_costs_its_own_group(tmp_path: Path) -> None:
    """A tool loop of the user's may write what the engine was not asked for: no version can be told then."""
    jobs = [job(0), job(1, tokens=REWRITTEN[0]), job(2)]
    setting = Setting(tmp_path, jobs, FakeEngine(delta=True), in_flight_update=True)
    if setting.trl.samples_whole:
        pytest.skip("no code of the user's runs between the tokens")
    assert sorted(setting.run()) == [0, 2]
    assert [seq for seq, _ in setting.queue.failed] == [1]


def test_adapters_need_no_pause(tmp_path: Path) -> None:
    jobs = [job(0, tokens=ENDLESS), job(1), job(2), job(3), *(job(seq, min_version=1) for seq in range(4, 8))]
    setting = Setting(tmp_path, jobs, FakeEngine(versions_at_once=2))

    def before_step(step: int) -> None:
        setting.weights.version = int(step >= 3)
        setting.end_long_ones(when_done=7)

    setting.engine.before_step = before_step
    groups = setting.run()
    assert setting.engine.loads == [(0, ()), (1, (0,))], "loaded while version 0 was in use"
    assert groups[7].policy_version == 1
    assert [group.job.seq for group in setting.queue.completed][-1] == 0


def test_a_job_waits_for_the_version_that_it_needs(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1, min_version=2)], FakeEngine())

    publish(setting, {2: 2})
    groups = setting.run()
    assert (groups[0].policy_version, groups[1].policy_version) == (0, 2)


def test_deterministic_means_alone_and_seeded_by_the_job(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1), job(0)], FakeEngine(), deterministic=True)
    setting.run()
    seeds = setting.engine.seeds
    assert (setting.engine.most, len({*seeds[:4]})) == (2, 4)
    assert seeds[:2] == seeds[4:], "the same job, the same seeds"


def test_a_fair_share_is_left_to_other_workers(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(seq) for seq in range(4)], FakeEngine())
    setting.queue.workers = 2
    setting.engine.before_step = lambda step: setattr(setting, "goes_on", False)
    assert setting.worker._capacity() == 2


def test_groups_per_claim_is_the_most_in_flight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(seq) for seq in range(6)], FakeEngine(), groups_per_claim=1)
    assert len(setting.run()) == 6
    assert setting.engine.most == 2


class StopAfter:
    """A request to stop that comes after this many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_stop_breaks_off_what_is_in_flight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=ENDLESS)], FakeEngine(), should_stop=StopAfter(50))
    assert setting.run() == {}
    assert not setting.engine.open and not setting.queue.failed


def test_a_full_disk_keeps_the_job_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.archive.disk_space.RETRY_S", 0.001)
    setting = Setting(tmp_path, [job(0)], FakeEngine())
    room = Mock(side_effect=[DiskFullError("no room"), DiskFullError("no room"), None])
    complete = setting.queue.complete
    setting.queue.complete = lambda claim, group: [room(), complete(claim, group)]
    assert sorted(setting.run()) == [0]
    assert room.call_count == 3


def test_a_worker_that_is_asked_to_stop_does_not_wait_for_room(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0)], FakeEngine(), should_stop=StopAfter(50))

    def full(claim: Claim, group: RolloutGroup) -> None:
        setting.worker._should_stop = StopAfter(0)
        raise DiskFullError("no room")

    setting.queue.complete = full  # type: ignore[method-assign]
    assert setting.run() == {}
    assert setting.queue.failed == [], "the queue hands the job back"


def test_a_tool_that_hangs_is_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or `--worker-timeout` would never end the worker."""
    monkeypatch.setattr("async_grpo.rollout.turns.groups.WAKE_S", 0.001)
    monkeypatch.setattr("async_grpo.rollout.turns.groups.CLOSE_S", 0.0)
    setting = Setting(tmp_path, [job(0)], FakeEngine(), should_stop=StopAfter(100))
    if setting.trl.samples_whole:
        pytest.skip("no code of the user's runs between the tokens")
    go_on = threading.Event()
    monkeypatch.setattr(setting.trl, "generate", lambda jobs, version, sample: go_on.wait(60.0))
    monkeypatch.setattr(setting.worker._generation._copies, "_idle", [setting.trl])  # type: ignore[attr-defined]
    moments: list[str] = []
    monkeypatch.setattr(activity, "progress", lambda: moments.append("progress"))
    assert setting.run() == {}
    go_on.set()
    assert moments == []


def test_every_step_of_the_engine_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(tmp_path, [job(0)], FakeEngine())
    steps: list[int] = []
    monkeypatch.setattr(activity, "progress", lambda: steps.append(setting.engine.steps))
    setting.run()
    assert set(range(TOKENS)) <= set(steps)


def test_an_unserved_worker_does_not_look_for_jobs_that_it_may_not_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs are pending while their server is dead: a wait for jobs ends at once, again and again."""
    setting = Setting(tmp_path, [job(0)], FakeEngine(), should_stop=StopAfter(20))
    monkeypatch.setattr(setting.queue, "served", lambda: False)
    naps: list[float] = []
    monkeypatch.setattr("async_grpo.rollout.worker.time.sleep", naps.append)
    setting.queue.on_idle = lambda: pytest.fail("waited for jobs")
    assert setting.run() == {}
    assert naps and min(naps) >= 0.01
    assert len(setting.queue.waiting) == 1


def test_a_worker_that_has_waited_long_for_a_server_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.rollout.worker.SERVER_WAIT_S", 0.05)
    setting = Setting(tmp_path, [], FakeEngine())
    setting.queue.served = lambda: False  # type: ignore[method-assign]
    with pytest.raises(WaitTimeoutError, match=r"waiting for a parameter server that issues jobs in .*--resume"):
        setting.run()


def test_weights_that_cannot_be_had_while_the_server_lives_end_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sampled by the weights that the engine has; the queue hands the jobs back."""
    monkeypatch.setattr("async_grpo.rollout.worker.WEIGHTS_WAIT_S", 0.02)
    setting = Setting(tmp_path, [job(0)], FakeEngine())
    setting.worker._version = 0

    monkeypatch.setattr(setting.weights, "lease", Mock(side_effect=ExporterDiedError("gone")))
    with pytest.raises(WaitTimeoutError):
        setting.run()
    assert setting.engine.steps == 0
    assert (setting.queue.failed, setting.queue.handed_back) == ([], [])


def test_claims_are_handed_back_once_their_server_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(tmp_path, [job(0)], FakeEngine(), should_stop=StopAfter(50))
    lives = [True]

    def died() -> None:
        lives[0] = False
        raise ExporterDiedError("gone")

    monkeypatch.setattr(setting.weights, "lease", died)
    monkeypatch.setattr(setting.queue, "served", lambda: lives[0])
    assert setting.run() == {}
    assert setting.queue.handed_back == [0]


def test_a_job_that_was_issued_again_is_not_claimed_while_it_is_in_flight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=ENDLESS)], FakeEngine())

    def issue_again(step: int) -> None:
        if step == 2:
            setting.queue.waiting += [job(0), job(1)]
        setting.end_long_ones(when_done=1)

    setting.engine.before_step = issue_again
    setting.run()
    assert [group.job.seq for group in setting.queue.completed] == [1, 0, 0]
    assert setting.engine.most == 4


def test_sampling_settings_that_no_engine_knows_are_not_ignored() -> None:
    unknown = replace(job(3), sampling={"temperature": 0.0, "typical_p": 0.5})
    guided = replace(job(4), sampling={"eta": 0.2})
    trl = object.__new__(RolloutTrainer)
    trl._is_guided = False
    for job_, message in (
        (unknown, r"Job 3 sets typical_p. A job may set temperature, top_p, top_k"),
        (guided, r"Job 4 sets eta, the strength of guidance, and this worker's trainer is not guided"),
    ):
        for make in (lambda job_: trl.prepare(job_, 0), rows_of):
            with pytest.raises(UnsupportedError, match=message):
                make(job_)


def test_a_run_that_asks_for_another_trainer_ends_the_worker_before_it_claims(tmp_path: Path) -> None:
    check_run = Mock(side_effect=UnsupportedError("start it again"))
    setting = Setting(tmp_path, [job(0)], FakeEngine(), check_run=check_run)
    with pytest.raises(UnsupportedError, match="start it again"):
        setting.run()
    assert len(setting.queue.waiting) == 1


def test_requests_that_got_lost_weights_in_flight_are_handed_back(tmp_path: Path) -> None:
    """The exporter dies while the engine, which is in the middle of its requests, copies the weights."""
    setting = Setting(
        tmp_path, [job(0, tokens=30)], FakeEngine(delta=True), in_flight_update=True, should_stop=StopAfter(200)
    )
    setting.weights.dies_with = 1
    publish(setting, {3: 1})

    def hand_back(claim: Claim) -> None:
        setting.queue.handed_back.append(claim.job.seq)
        setting.queue.waiting.append(job(0))

    setting.queue.hand_back = hand_back  # type: ignore[method-assign]
    groups = setting.run()
    assert setting.engine.forgotten
    assert setting.queue.handed_back == [0]
    assert set(groups[0].completion_ids.tolist()) == {2}, "sampled from the next server's weights alone"


def test_weights_that_were_lost_while_nothing_was_sampled_spoil_no_later_groups(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0)], FakeEngine(), in_flight_update=True, should_stop=StopAfter(200))
    setting.weights.dies_with = 0
    groups = setting.run()
    assert setting.engine.forgotten and setting.queue.handed_back == []
    assert set(groups[0].completion_ids.tolist()) == {2}


@pytest.mark.parametrize("wrapped", ["alone", "in a group", "as the cause"])
def test_what_no_worker_can_do_right_ends_the_worker_at_the_first_group(tmp_path: Path, wrapped: str) -> None:
    refusal = RunRefused("the optimizer is not in workers")
    setting = Setting(tmp_path, [job(seq) for seq in range(5)], FakeEngine())

    def refuse(groups: Sequence[GeneratedGroup]) -> list[Scores]:
        if wrapped == "alone":
            raise refusal
        if wrapped == "in a group":
            raise ExceptionGroup("of a task group", [ValueError(), refusal])
        raise ValueError("a reward failed") from refusal

    setting.trl.score = refuse  # type: ignore[method-assign]
    with pytest.raises(RunRefused, match="the optimizer is not in workers"):
        setting.run()
    assert setting.queue.failed == [] and setting.worker.statistics.failed == 0
