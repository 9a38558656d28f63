"""The loop of a worker, with an engine that writes one token a step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import job as make_job

from async_grpo.queue import Claim
from async_grpo.queue.names import PROCESSING, JobName
from async_grpo.records import Job, RolloutGroup, WorkerId
from async_grpo.rollout.engines import PreparedGroup, SampledGroup
from async_grpo.rollout.engines.continuous import Chunk, ContinuousEngine
from async_grpo.rollout.trl_trainer import GeneratedGroup, Scores
from async_grpo.rollout.worker import Worker, WorkerContext, once_issued
from async_grpo.settings import WorkerSettings

TOKENS = 6  # of a completion; a prompt [n] may ask for more
ENDLESS = 10**9
REWRITTEN = [7]  # prompt of a group whose completions the user's code changes


class FakeEngine:
    """Writes the version of its weights as every token."""

    def __init__(self, *, versions_at_once: int = 1, delta: bool = False) -> None:
        self.versions_at_once = versions_at_once
        self.max_num_seqs = 8
        self.version = -1
        self.loads: list[tuple[int, tuple[int, ...]]] = []  # version, versions in use
        self.open: dict[str, list[Any]] = {}  # request -> [version or None, prompt, tokens so far]
        self.delta = delta
        self.seeds: list[int | None] = []
        self.most = 0
        self.before_step: Callable[[int], None] = lambda step: None
        self.steps = 0

    @property
    def busy(self) -> bool:
        return bool(self.open)

    def submit(self, request_id: str, prompt_ids: list[int], *, seed: int | None, version: int) -> None:
        if prompt_ids == [-1]:
            raise ValueError("the prompt is too long")
        self.seeds.append(seed)
        self.open[request_id] = [version, prompt_ids[0], 0]
        self.most = max(self.most, len(self.open))

    def step(self) -> list[Chunk]:
        self.steps += 1
        self.before_step(self.steps)
        chunks = []
        for request, state in list(self.open.items()):
            state[2] += 1
            finished = state[2] >= max(TOKENS, state[1])
            if finished:
                del self.open[request]
            count = 1 if self.delta else state[2]
            if self.delta or finished:
                token = self.version if self.delta or self.versions_at_once == 1 else state[0]
                chunks.append(Chunk(request, [token] * count, [-0.5] * count, finished))
        return chunks

    def abort(self, request_ids: list[str]) -> None:
        for request in request_ids:
            self.open.pop(request, None)

    def load(self, tensors: Any, version: int, in_use: Any = ()) -> None:
        assert self.delta or self.versions_at_once > 1 or not self.open, "weights changed under running requests"
        self.version = version
        self.loads.append((version, tuple(sorted(in_use))))


class FakeWeights:
    generation = "one"

    def __init__(self) -> None:
        self.version: int | None = 0

    @contextmanager
    def lease(self) -> Iterator[Any]:
        yield SimpleNamespace(items=dict, version=self.version, generation=self.generation)


class FakeQueue:
    name, device = "dev1", 1

    def __init__(self, jobs: list[Job]) -> None:
        self.waiting = list(jobs)
        self.completed: list[RolloutGroup] = []
        self.failed: list[tuple[int, str]] = []
        self.handed_back: list[int] = []
        self.workers = 1
        self.on_idle: Callable[[], None] = lambda: None

    def claim(self, limit: int, skip: Any = ()) -> list[Claim]:
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        return [Claim(job, 0, JobName(job.seq, 0, PROCESSING, WorkerId(1))) for job in taken]

    def complete(self, claim: Claim, group: RolloutGroup) -> None:
        self.completed.append(group)

    def fail(self, claim: Claim, error: str) -> None:
        self.failed.append((claim.job.seq, error))

    def hand_back(self, claim: Claim) -> None:
        self.handed_back.append(claim.job.seq)

    def pending(self) -> int:
        return len(self.waiting)

    def served(self) -> bool:
        return True

    def alive_workers(self) -> int:
        return self.workers

    def wait(self, timeout_s: float, skip: Any = ()) -> bool:
        self.on_idle()
        return False


class FakeTRL:
    """The prompts are in the row; `samples_whole` decides whether TRL asks for their tokens itself."""

    def __init__(self, *, samples_whole: bool) -> None:
        self.samples_whole = samples_whole
        self.trainer = SimpleNamespace(reward_func_names=("reward",), environment_factories=None)
        self.finish_each: Callable[[SampledGroup], None] = lambda sampled: None

    def fork(self) -> FakeTRL:
        return copy.copy(self)

    def prepare(self, jobs: Sequence[Job], version: int) -> list[PreparedGroup]:
        return [PreparedGroup(job=job, version=version, prompt_ids=prompts_of(job)) for job in jobs]

    def finish(self, sampled: Sequence[SampledGroup]) -> list[GeneratedGroup]:
        for group in sampled:
            self.finish_each(group)
        return [made(one.prepared.job, one.prepared.version, one.token_ids, one.versions) for one in sampled]

    def generate(self, jobs: Sequence[Job], version: int, sample: Any) -> list[GeneratedGroup]:
        groups = []
        for job in jobs:
            ids, _ = sample(prompts_of(job))
            if job.row["ids"] == REWRITTEN:
                ids[0][0] = 99
            groups.append(made(job, version, ids, None))
        return groups

    def score(self, group: GeneratedGroup) -> Scores:
        return Scores(rewards=torch.zeros(2, 1), metrics={}, extra_columns={})


def prompts_of(job: Job) -> list[list[int]]:
    return [list(job.row["ids"]) for _ in range(job.num_generations)]


def made(job: Job, version: int, ids: list[list[int]], versions: list[list[int]] | None) -> GeneratedGroup:
    size = job.num_generations
    return GeneratedGroup(
        job=job,
        version=min((number for row in versions or () for number in row), default=version),
        rows=[job.row] * size,
        prompts=["p"] * size,
        completions=["c"] * size,
        prompt_ids=prompts_of(job),
        completion_ids=ids,
        logprobs=[[-0.5] * len(row) for row in ids],
        token_versions=versions,
        tool_masks=None,
        environments=None,
        state=None,
        metrics={},
    )


def job(seq: int, tokens: int = TOKENS, min_version: int = 0) -> Job:
    return make_job(seq, row={"ids": [tokens]}, min_version=min_version)


class Setting:
    """A worker over fakes, which ends when the queue is idle and everything came back, unless the test says more."""

    samples_whole = True

    def __init__(self, tmp_path: Path, jobs: list[Job], engine: FakeEngine, **options: Any) -> None:
        (tmp_path / "alive").mkdir()
        self.engine, self.weights, self.queue = engine, FakeWeights(), FakeQueue(jobs)
        self.goes_on = True
        self.queue.on_idle = self.end
        state = SimpleNamespace(state="running")
        settings = WorkerSettings(groups_per_claim=options.pop("groups_per_claim", None))
        deterministic = options.pop("deterministic", False)
        self.trl = FakeTRL(samples_whole=self.samples_whole)
        context = WorkerContext(
            trl=self.trl,  # type: ignore[arg-type]
            queue=self.queue,  # type: ignore[arg-type]
            weights=self.weights,  # type: ignore[arg-type]
            run=SimpleNamespace(root=tmp_path, read_state=lambda: state if self.goes_on else None),  # type: ignore[arg-type]
            stop=options.pop("stop", False),
            settings=settings,
            deterministic=deterministic,
        )
        in_flight_update = options.pop("in_flight_update", False)
        self.worker = Worker(
            context,
            ContinuousEngine(
                engine,
                group_size=2,
                in_flight_update=in_flight_update,
                deterministic=deterministic,
            ),
        )

    def end(self) -> None:
        self.goes_on = False

    def end_long_ones(self, when_done: int) -> None:
        """Let every completion end once so many groups have come back."""
        if len(self.queue.completed) == when_done:
            for state in self.engine.open.values():
                state[1] = 0

    def run(self) -> dict[int, RolloutGroup]:
        self.worker.run()
        return {group.job.seq: group for group in self.queue.completed}


@pytest.fixture(autouse=True)
def always_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.rollout.worker.LOOK_S", 0.0)


@pytest.fixture(autouse=True, params=["whole", "in threads"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups whose tokens are sampled in one go, and groups that wait for them in threads."""
    monkeypatch.setattr(Setting, "samples_whole", request.param == "whole")


def test_groups_are_in_flight_together_and_each_comes_back(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=ENDLESS), *(job(seq) for seq in range(1, 7))], FakeEngine())
    setting.engine.before_step = lambda step: setting.end_long_ones(when_done=6)
    groups = setting.run()
    assert sorted(groups) == list(range(7))
    assert setting.engine.most == 8, "four groups of two fit into the engine's batch"
    assert [group.job.seq for group in setting.queue.completed][-1] == 0, "the long one held nobody up"
    assert groups[3].completion_lengths.tolist() == [TOKENS, TOKENS]
    assert groups[3].token_versions is None
    assert groups[0].timings.generate_s > 0


def test_off_drains_before_new_weights_and_takes_no_job_meanwhile(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=30), job(1), *(job(seq) for seq in range(2, 8))], FakeEngine())

    def publish(step: int) -> None:
        if step == 3:
            setting.weights.version = 1

    setting.engine.before_step = publish
    groups = setting.run()
    assert [version for version, _ in setting.engine.loads] == [0, 1]
    assert {groups[seq].policy_version for seq in range(4)} == {0}
    assert {groups[seq].policy_version for seq in range(4, 8)} == {1}
    for group in groups.values():
        assert set(group.completion_ids.tolist()) == {group.policy_version}


def test_on_goes_on_with_new_weights_and_every_token_knows_its_version(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=20)], FakeEngine(delta=True), in_flight_update=True)

    def publish(step: int) -> None:
        setting.weights.version = min(step // 5, 3)

    setting.engine.before_step = publish
    group = setting.run()[0]
    assert group.policy_version == 0, "the oldest"
    assert group.token_versions is not None
    assert group.token_versions.tolist() == group.completion_ids.tolist(), "the engine writes its version"
    assert set(group.token_versions.tolist()) == {0, 1, 2, 3}


def test_a_completion_that_does_not_continue_its_prompts_costs_its_own_group(tmp_path: Path) -> None:
    """A tool loop of the user's may write what the engine was not asked for: no version can be told then."""
    jobs = [job(0), job(1, tokens=REWRITTEN[0]), job(2)]
    setting = Setting(tmp_path, jobs, FakeEngine(delta=True), in_flight_update=True)
    if setting.trl.samples_whole:
        pytest.skip("no code of the user's runs between the tokens")
    assert sorted(setting.run()) == [0, 2]
    assert [seq for seq, _ in setting.queue.failed] == [1]


def test_a_completion_that_trl_cannot_finish_costs_its_own_group(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1), job(2)], FakeEngine())
    if not setting.trl.samples_whole:
        pytest.skip("finished by TRL in the middle of its function")

    def fail(sampled: SampledGroup) -> None:
        if sampled.prepared.job.seq == 1:
            raise RuntimeError("no such text")

    setting.trl.finish_each = fail
    assert sorted(setting.run()) == [0, 2]
    ((seq, error),) = setting.queue.failed
    assert seq == 1 and "no such text" in error


def test_adapters_need_no_pause(tmp_path: Path) -> None:
    jobs = [job(0, tokens=ENDLESS), job(1), job(2), job(3), *(job(seq, min_version=1) for seq in range(4, 8))]
    setting = Setting(tmp_path, jobs, FakeEngine(versions_at_once=2))

    def publish(step: int) -> None:
        setting.weights.version = 1 if step >= 3 else 0
        setting.end_long_ones(when_done=7)

    setting.engine.before_step = publish
    groups = setting.run()
    assert setting.engine.loads == [(0, ()), (1, (0,))], "loaded while version 0 was in use"
    assert groups[7].policy_version == 1
    assert [group.job.seq for group in setting.queue.completed][-1] == 0


def test_a_job_waits_for_the_version_that_it_needs(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1, min_version=2)], FakeEngine())

    def publish(step: int) -> None:
        setting.weights.version = 2 if step >= 2 else 0

    setting.engine.before_step = publish
    groups = setting.run()
    assert (groups[0].policy_version, groups[1].policy_version) == (0, 2)


def test_a_prompt_that_the_engine_refuses_costs_its_own_group(tmp_path: Path) -> None:
    bad = job(1, tokens=-1)
    setting = Setting(tmp_path, [job(0), bad, job(2)], FakeEngine())
    groups = setting.run()
    assert sorted(groups) == [0, 2]
    ((seq, error),) = setting.queue.failed
    assert seq == 1
    assert "the prompt is too long" in error


def test_deterministic_means_alone_and_seeded_by_the_job(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0), job(1), job(0)], FakeEngine(), deterministic=True)
    setting.run()
    seeds = setting.engine.seeds
    assert setting.engine.most == 2
    assert len(set(seeds[:4])) == 4
    assert seeds[:2] == seeds[4:], "the same job, the same seeds"


def test_a_fair_share_is_left_to_other_workers(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(seq) for seq in range(4)], FakeEngine())
    setting.queue.workers = 2
    setting.engine.before_step = lambda step: setattr(setting, "goes_on", False)
    assert setting.worker._room() == 2


def test_groups_per_claim_is_the_most_in_flight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(seq) for seq in range(6)], FakeEngine(), groups_per_claim=1)
    assert len(setting.run()) == 6
    assert setting.engine.most == 2


class StopAfter:
    """A stop request that comes after so many looks at it."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def __bool__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_stop_breaks_off_what_is_in_flight(tmp_path: Path) -> None:
    setting = Setting(tmp_path, [job(0, tokens=ENDLESS)], FakeEngine(), stop=StopAfter(50))
    assert setting.run() == {}
    assert not setting.engine.open
    assert setting.queue.failed == []


@pytest.mark.parametrize(
    ("looks", "found"),
    [
        ([0], 0),  # nothing to wait for
        ([16], 16),
        ([20], 20),
        ([3, 9, 16], 16),  # a round is being issued
        ([3, 9, 14, 14], 14),  # a part of one
        ([3, 3], 3),
        ([3, 1], 1),  # another worker was there
    ],
)
def test_a_round_that_is_being_issued_is_waited_for(looks: list[int], found: int) -> None:
    left = iter(looks)
    assert once_issued(lambda: next(left), enough=16) == found
    assert list(left) == [], "looked as often as there was reason to"
