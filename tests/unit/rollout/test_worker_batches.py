"""The loop of a worker whose engine samples batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine, Decoding
from async_grpo.engines.policy import Policy, PolicyWeights
from async_grpo.errors import GeneratorError
from async_grpo.queue import Claim
from async_grpo.records import Job
from async_grpo.rollout import worker as worker_module
from async_grpo.rollout.worker import once_issued
from async_grpo.setup.generator_choice import HF
from async_grpo.tokens import Tokens
from async_grpo_ipc import WeightExporter, open_remote_memory
from kit.fake_cuda import Knobs, install
from kit.worker_fakes import FakeEngine, Setting, job


class FakeBatchEngine(BatchEngine):
    """Group `n` takes `lengths[n]` steps; each token is the version that the policy adopted."""

    capabilities = HF

    def __init__(self, lengths: dict[int, int]) -> None:
        super().__init__(most_groups=4)
        self.lengths = lengths
        self.batches: list[list[int]] = []
        self.policy = FakePolicy()
        self.after_step: Callable[[], None] = lambda: None
        self.before: Callable[[list[int]], None] = lambda batch: None

    def follow(self, weights: Any) -> FakePolicy:
        self.policy._weights = weights
        return self.policy

    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        self.batches.append([group.job.seq for group in groups])
        self.before(self.batches[-1])
        for step in range(1, 1 + max(self.lengths[group.job.seq] for group in groups)):
            assert self.policy._weights.held, "the weights are read"
            self.after_step()
            ended = [group for group in groups if self.lengths[group.job.seq] == step]
            yield [
                SampledGroup(prepared=group, tokens=[Tokens([group.version], [-0.5]) for _ in range(2)])
                for group in ended
            ]


class FakePolicy(Policy):
    _weights: Any = None
    adopted = 0

    def adopt(self, in_use: Any = ()) -> int | None:
        assert not in_use, "a batch is sampled by one version"
        self._weights.held = True
        self.adopted += 1
        return self._weights.version


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "RUN_LOOK_S", worker_module.LOOK_S)


def batches_of(
    tmp_path: Path, lengths: dict[int, int], jobs: list[Job] | None = None, **options: Any
) -> tuple[FakeBatchEngine, Setting]:
    """A worker with a job for each group, unless there are others, and its engine."""
    engine = FakeBatchEngine(lengths)
    engine.before = options.pop("before", engine.before)
    jobs = [job(seq) for seq in lengths] if jobs is None else jobs
    return engine, Setting(tmp_path, jobs, FakeEngine(), batch_engine=engine, **options)


def ones(count: int) -> dict[int, int]:
    return dict.fromkeys(range(count), 1)


def test_a_batch_is_claimed_sampled_and_released_as_one(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, {seq: 1 + seq for seq in range(6)})
    assert sorted(setting.run()) == list(range(6))
    assert engine.batches == [[0, 1, 2, 3], [4, 5]]
    assert not setting.weights.held


def test_a_group_is_published_while_others_of_its_batch_are_sampled(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, {0: 1, 1: 10**9})

    def end() -> None:
        if setting.queue.completed:
            setting.goes_on = False
            setting.worker._check_run_at = 0.0

    engine.after_step = end
    assert sorted(setting.run()) == [0]
    assert engine.batches == [[0, 1]]


def test_a_batch_waits_for_the_newest_version_that_one_of_its_jobs_needs(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, ones(2), [job(0), job(1, min_version=3)])

    def publish() -> bool:
        assert not setting.weights.held, "released between two looks"
        setting.weights.version = min(3, (setting.weights.version or 0) + 1)
        return True

    setting.queue.served = publish  # type: ignore[method-assign]
    groups = setting.run()
    assert engine.batches == [[0, 1]]
    assert {group.policy_version for group in groups.values()} == {3}


def test_an_error_in_a_batch_costs_the_group_that_it_belongs_to(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, ones(3), before=failing(lambda batch: 1 in batch, "no such token"))
    assert sorted(setting.run()) == [0, 2]
    assert engine.batches == [[0, 1, 2], [0], [1], [2]]
    ((seq, error),) = setting.queue.failed
    assert seq == 1 and "no such token" in error


OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 79.18 GiB."
BROKEN = "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasSgemm( handle, opa, opb, m, n, k )`"


def failing(when: Callable[[list[int]], bool], what: str) -> Callable[[list[int]], None]:
    def before(batch: list[int]) -> None:
        if when(batch):
            raise (torch.OutOfMemoryError if what == OUT_OF_MEMORY else RuntimeError)(what)

    return before


def test_a_batch_that_memory_has_no_room_for_is_divided_and_none_is_as_large_again(
    tmp_path: Path, warnings: list[str]
) -> None:
    engine, setting = batches_of(tmp_path, ones(7), before=failing(lambda batch: len(batch) > 2, OUT_OF_MEMORY))
    assert sorted(setting.run()) == [*range(7)]
    assert engine.batches == [[0, 1, 2, 3], [0, 1], [2, 3], [4, 5], [6]]
    assert setting.queue.failed == []
    (said,) = warnings
    assert said.startswith("out of memory with 4 groups of 2 completions together, so at most 2 groups from now on:")


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, BROKEN])
def test_a_device_that_fails_for_every_group_ends_the_worker_and_no_job_fails(tmp_path: Path, error: str) -> None:
    engine, setting = batches_of(tmp_path, ones(4), before=failing(lambda batch: True, error))
    with pytest.raises(GeneratorError, match=r"2 groups in a row .* no group is to blame: .*nvidia-smi names it"):
        setting.run()
    assert [batch for batch in engine.batches if len(batch) == 1] == [[0], [1]]
    assert setting.queue.failed == []


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, BROKEN])
def test_a_group_that_memory_has_no_room_for_alone_fails_after_the_others(tmp_path: Path, error: str) -> None:
    engine, setting = batches_of(tmp_path, ones(4), before=failing(lambda batch: 1 in batch, error))
    assert sorted(setting.run()) == [0, 2, 3]
    assert engine.batches[-1] == [1]
    ((seq, said),) = setting.queue.failed
    assert seq == 1 and error in said


def test_groups_that_are_claimed_one_by_one_cost_a_broken_device_one_attempt(tmp_path: Path) -> None:
    _, setting = batches_of(tmp_path, ones(4), before=failing(lambda batch: True, BROKEN), deterministic=True)
    with pytest.raises(GeneratorError):
        setting.run()
    assert len(setting.queue.failed) == 1


def test_an_engine_that_is_broken_ends_the_worker_and_no_job_fails(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, {0: 3})
    engine.after_step = Mock(side_effect=GeneratorError("the server is gone"))
    with pytest.raises(GeneratorError, match="is gone"):
        setting.run()
    assert setting.queue.failed == []


def test_deterministic_batches_are_of_one_group(tmp_path: Path) -> None:
    engine, setting = batches_of(tmp_path, {0: 2, 1: 2}, deterministic=True, groups_per_claim=4)
    assert sorted(setting.run()) == [0, 1]
    assert engine.batches == [[0], [1]]


def test_a_claim_of_so_many_groups_waits_until_their_round_is_issued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the first job of a round would be sampled alone."""
    engine, setting = batches_of(tmp_path, ones(3), [job(0)], groups_per_claim=4)
    coming = [job(1), job(2)]

    def issue(seconds: float) -> None:
        if coming:
            setting.queue.waiting.append(coming.pop(0))

    monkeypatch.setattr("async_grpo.rollout.worker.time.sleep", issue)
    setting.run()
    assert engine.batches == [[0, 1, 2]]


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


def test_what_was_sampled_from_lost_weights_is_not_handed_over(tmp_path: Path) -> None:
    """As on a GPU whose parameter server dies: its memory may hold anything by the time a step has ended."""
    engine, setting = batches_of(tmp_path, {seq: 2 + seq for seq in range(3)})
    steps: list[int] = []

    def step() -> None:
        steps.append(1)
        setting.weights.lost = len(steps) == 2  # in the step that ends the first group

    def hand_back(claim: Claim) -> None:
        setting.weights.lost = False
        setting.weights.version = 5  # of the next server
        setting.queue.handed_back.append(claim.job.seq)
        setting.queue.waiting.append(claim.job)

    engine.after_step = step
    setting.queue.hand_back = hand_back  # type: ignore[method-assign]
    let_go: list[int] = []
    finish = setting.trl.finish
    setting.trl.finish = lambda sampled: replace(  # type: ignore[method-assign]
        finish(sampled), let_go=lambda: let_go.append(sampled.prepared.version)
    )
    groups = setting.run()
    assert let_go == [0, 5, 5, 5], "what environments the dropped group has are free again"
    assert (setting.queue.handed_back, setting.queue.failed) == ([0, 1, 2], [])
    assert {seq: group.policy_version for seq, group in groups.items()} == {0: 5, 1: 5, 2: 5}
    assert not setting.weights.held


class ReadsInPlace(FakeBatchEngine):
    """Its model's parameters are views of the published weights."""

    def follow(self, weights: Any) -> Any:
        self.policy._weights = SimpleNamespace(held=True)
        return PolicyWeights(weights, nn.Linear(3, 2))


def test_a_worker_that_reads_in_place_waits_for_the_gpu_only_when_a_group_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = install(Knobs(folder=str(tmp_path)), monkeypatch)
    engine, waited = ReadsInPlace({0: 20, 1: 40}), [0]
    engine.after_step = lambda: waited.append(runtime.synchronized)
    with WeightExporter.from_model(nn.Linear(3, 2), tmp_path / "handle.json") as exporter:
        exporter.publish(1)
        with open_remote_memory(tmp_path / "handle.json") as remote:
            setting = Setting(tmp_path, [job(0), job(1)], FakeEngine(), batch_engine=engine, weights=remote)
            assert sorted(setting.run()) == [0, 1]
            assert remote.can_alias(nn.Linear(3, 2)), "it did read in place"
    assert len(waited) == 41
    first, second = waited[1:21], waited[21:]
    assert set(first) == {first[0]} and set(second) == {first[0] + 1}, "once for the first group, before it was used"


@pytest.mark.parametrize("late", [1, 6])
def test_jobs_whose_weights_do_not_come_give_way_to_others(
    late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that was resumed earlier than its workers are may hold back version 9 for an evaluation of version 0."""
    monkeypatch.setattr(worker_module, "LATE_S", 0.0)
    monkeypatch.setattr(worker_module, "WEIGHTS_WAIT_S", 5.0)
    jobs = [*(job(seq, min_version=9) for seq in range(late)), job(10), job(11)]
    _, setting = batches_of(tmp_path, {10: 1, 11: 1}, jobs)
    assert sorted(setting.run()) == [10, 11]
    assert sorted(set(setting.queue.handed_back)) == list(range(late))
