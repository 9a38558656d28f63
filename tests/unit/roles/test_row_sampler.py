"""The server of `async-grpo generate` over a real queue: the test plays the workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import load_from_disk

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.archive.groups import FinishedGroups
from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.evals.asking import Plan, SampleRequest
from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import Job, RolloutGroup
from async_grpo.reports.rollouts import select
from async_grpo.roles import row_sampler
from async_grpo.roles.answering import AnswerServer
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.run_plan import SampledRows
from async_grpo.training import prompts
from kit.groups import make_group
from kit.plans import planned

PROBLEMS = [{"prompt": f"{n}+{n}=", "task": "sums"} for n in range(4)]


def answer(claim: Claim) -> RolloutGroup:
    """Each completion is the prefix, the problem's first digit, and the index of the completion."""
    job, size = claim.job, claim.job.num_generations
    completions = [[*job.prefix_ids, int(job.row["prompt"][0]), index] for index in range(size)]
    tokens = [token for ids in completions for token in ids]
    return make_group(
        job,
        attempt=claim.attempt,
        completion_lengths=np.array([len(ids) for ids in completions], np.int32),
        completion_ids=np.array(tokens, np.int32),
        sampling_logprobs=np.full(len(tokens), -0.5, np.float32),
        rewards=np.array([[index] for index in range(size)], np.float32),
    )


class Stage:
    """A prepared run, whose worker answers one job each time that the server looks whether it should stop."""

    def __init__(self, folder: Path, plan: Callable[[int], Plan] | None = None, samples: int | None = None) -> None:
        self.out = folder / "rows"
        self._plan = planned(folder, models=("m",), rows=SampledRows(self.out, samples), max_attempts=1)
        self.root = folder / "run"
        self.state = prepare(self.root, self._plan)
        self._own = {} if plan is None else {"generation_plan": plan}
        self.asked: list[Job] = []

    def serve(self, *, most: int = 1000, poison: Sequence[str] = ()) -> bool:
        sizes = {"num_generations": 2, "max_completion_length": 9}
        trainer = SimpleNamespace(**sizes, args=SimpleNamespace(seed=3), **self._own)
        weights: Any = SimpleNamespace(publish=lambda version, model: None)
        with (
            closing(ServerQueue.open(self.root, self.state.run_id, max_attempts=1, watch_workers=False)) as queue,
            closing(WorkerQueue.open(self.root, 1, "cpu")) as worker,
        ):

            def should_stop() -> bool:
                for claim in worker.claim(1):
                    self.asked.append(claim.job)
                    if claim.job.row["prompt"] in poison:
                        worker.fail(claim, "ValueError: poison")
                    else:
                        worker.complete(claim, answer(claim))
                return len(self.asked) >= most

            answers = AnswerServer(RunDir(self.root), self._plan, self.state, trainer, queue, weights, should_stop)
            return row_sampler.generate(answers)

    def rows(self) -> list[dict[str, Any]]:
        return list(load_from_disk(str(self.out)))


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sampler, "rule_of", lambda server: AdvantageRule())
    monkeypatch.setattr(prompts, "training_rows", lambda trainer: PROBLEMS)
    monkeypatch.setattr("async_grpo.evals.asking.WAKE_S", 0.001)


def two_waves(problems: int) -> Plan:
    groups = yield [SampleRequest(problem=problem, samples=1) for problem in range(problems)]
    yield [
        SampleRequest(problem=problem, prefix_ids=(5,) * cut, sampling={"temperature": 0.5})
        for problem, group in enumerate(groups)
        for cut in (1, 2)
        if group is not None
    ]


def test_without_a_plan_each_problem_has_the_same_number_of_rows_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert stage.serve()
    rows = stage.rows()
    assert [(row["problem"], row["sample"], row["reward"]) for row in rows] == [
        (n, index, float(index)) for n in range(4) for index in range(2)
    ]
    assert rows[3]["completion_ids"] == [1, 1] and rows[3]["prompt_ids"] == [1]
    shown = select(FinishedGroups(stage.root), limit=None).rollouts
    assert len(shown) == len(rows), "`rollouts` reads the run as any other"
    assert {job.purpose for job in stage.asked} == {"generate"} and {job.task for job in stage.asked} == {"sums"}


def test_a_later_wave_continues_what_an_earlier_one_sampled(tmp_path: Path) -> None:
    stage = Stage(tmp_path, two_waves)
    assert stage.serve()
    second = stage.asked[4:]
    assert [(job.prefix_ids, job.sampling) for job in second[:2]] == [
        ((5,), {"temperature": 0.5, "max_tokens": 8}),
        ((5, 5), {"temperature": 0.5, "max_tokens": 7}),
    ], "together no longer than the setup file lets completions be"
    assert len({job.seed for job in stage.asked}) == 12
    of_first = [(row["wave"], row["request"], row["completion_ids"]) for row in stage.rows()[:3]]
    assert of_first == [(0, 0, [0, 0]), (1, 0, [5, 0, 0]), (1, 1, [5, 5, 0, 0])]


def test_a_prefix_that_leaves_nothing_to_sample_is_refused(tmp_path: Path) -> None:
    def plan(problems: int) -> Plan:
        yield [SampleRequest(problem=0, prefix_ids=(5,) * 9, sampling={"max_tokens": 1})]
        yield [SampleRequest(problem=0), SampleRequest(problem=2, prefix_ids=(5,) * 9)]

    stage = Stage(tmp_path, plan)
    says = r"Wave 1 of the generation_plan continues 9 tokens of problem 2, .* at most 9"
    with pytest.raises(UsageError, match=says):
        stage.serve()
    assert [job.sampling for job in stage.asked] == [{"max_tokens": 1}]


def test_a_problem_that_fails_costs_itself_alone(tmp_path: Path, messages: list[str]) -> None:
    whole, stage = Stage(tmp_path / "whole", two_waves), Stage(tmp_path / "stage", two_waves)
    assert whole.serve() and stage.serve(poison=["1+1="])
    assert stage.rows() == [row for row in whole.rows() if row["problem"] != 1]
    seeds = {(job.row["prompt"], job.prefix_ids): job.seed for job in whole.asked}
    assert all(seeds[job.row["prompt"], job.prefix_ids] == job.seed for job in stage.asked)
    assert any("problem 1 could not be sampled" in message and "poison" in message for message in messages)


def test_a_generation_without_rows_fails(tmp_path: Path) -> None:
    with pytest.raises(AsyncGRPOError, match="Nothing was sampled"):
        Stage(tmp_path).serve(poison=[row["prompt"] for row in PROBLEMS])
    assert not (tmp_path / "rows").exists()


@pytest.mark.parametrize("most", [2, 4, 7])
def test_a_resume_asks_for_what_is_left(most: int, tmp_path: Path) -> None:
    whole, stage = Stage(tmp_path / "whole", two_waves), Stage(tmp_path / "stage", two_waves)
    assert whole.serve()
    assert not stage.serve(most=most) and not stage.out.exists()
    assert stage.serve()
    assert len(stage.asked) == 12 and len({job.seed for job in stage.asked}) == 12
    assert stage.rows() == whole.rows()
    files = [{path.name: path.read_bytes() for path in out.iterdir()} for out in (whole.out, stage.out)]
    assert files[0] == files[1]


def test_rows_that_are_there_already_are_kept_and_others_are_not_replaced(tmp_path: Path) -> None:
    stage, other = Stage(tmp_path), Stage(tmp_path / "other", samples=3)
    assert stage.serve() and stage.serve(), "the process was killed when it had written them"
    rows = stage.rows()
    other.out, other._plan = stage.out, replace(other._plan, rows=SampledRows(stage.out, 3))
    with pytest.raises(UsageError, match="has appeared since this generation began, and holds other rows"):
        other.serve()
    assert stage.rows() == rows
    assert {path.name for path in tmp_path.iterdir()} == {"run", "rows", "other"}, "nothing half is left"


def test_groups_of_other_requests_are_not_used(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    assert not stage.serve(most=3)
    stage._plan = replace(stage._plan, rows=SampledRows(stage.out, 3))
    assert stage.serve()
    assert len(stage.asked) == 3 + 4 and len(stage.rows()) == 12


def test_a_plan_says_what_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has a generation_plan"):
        Stage(tmp_path, two_waves, samples=3).serve()
