"""An evaluation over a real queue: the test plays the workers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.errors import DiskFullError
from async_grpo.evals.eval_ledger import Evaluated, EvaluationLedger, Judge, before_and_after, read
from async_grpo.evals.eval_schedule import RunEvaluations
from async_grpo.evals.evaluation import OPEN_AT_A_TIME, Evaluation, Problem, say_what_is_evaluated, warn_of_duplicates
from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import DIVERGENCE, Job, RolloutGroup
from async_grpo.settings import TrainingSettings
from kit.groups import RUN, make_group, make_job

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerQueue]:
    with closing(ServerQueue.open(tmp_path / "q", RUN, watch_workers=False)) as queue:
        yield queue


@pytest.fixture
def worker(server: ServerQueue) -> Iterator[WorkerQueue]:
    with closing(WorkerQueue.open(server.root, 1, "cpu")) as queue:
        yield queue


def problems(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{index}+{index}=", "task": "even" if index % 2 == 0 else "odd"} for index in range(count)]


def begin(
    server: ServerQueue,
    count: int = 4,
    version: int = 7,
    judge: Judge | None = None,
    replicates: int = 2,
    sampling: dict[str, Any] = GREEDY,
    finished: Iterable[RolloutGroup] = (),
) -> Evaluation:
    return Evaluation(
        server,
        judge or Judge(rule=AdvantageRule()),
        [Problem(row, row["task"]) for row in problems(count)],
        run_id=RUN,
        version=version,
        replicates=replicates,
        sampling=sampling,
        finished=finished,
        ks=(1, 2),
        seed=0,
        trainer_state={"global_step": 7, "max_steps": 9},
    )


def answer(claim: Claim, *, version: int, rewards: list[float]) -> RolloutGroup:
    given = np.array([[reward] for reward in rewards], np.float32)
    texts = [f"answer {index}" for index in range(len(rewards))]
    return make_group(claim.job, version, attempt=claim.attempt, rewards=given, completions=texts)


def serve(worker: WorkerQueue, *, version: int = 7, rewards: dict[str, list[float]] | None = None) -> int:
    """Answer everything that is pending; a prompt that `rewards` does not have is answered right, twice."""
    done = 0
    while claims := worker.claim(1):
        group = answer(claims[0], version=version, rewards=(rewards or {}).get(claims[0].job.row["prompt"], [1.0, 1.0]))
        worker.complete(claims[0], group)
        done += 1
    return done


def finish(evaluation: Evaluation, worker: WorkerQueue, **how: Any) -> Evaluated:
    for _ in range(100):
        result = evaluation.look()
        if result is not None:
            return result
        assert serve(worker, **how), "the evaluation waits, and no job is pending"
    raise AssertionError("the evaluation does not end")


def test_every_problem_is_answered_at_the_version_and_summed_up_by_task(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    evaluation = begin(server)
    assert evaluation.look() is None
    claims = worker.claim(8)
    assert [(claim.job.purpose, claim.job.min_version, claim.job.sampling) for claim in claims] == [
        ("eval", 7, GREEDY)
    ] * 4
    assert [claim.job.task for claim in claims] == ["even", "odd", "even", "odd"]
    assert all(claim.job.trainer_state["max_steps"] == 9 for claim in claims), "a reward may divide by it"
    for claim, rewards in zip(claims, ([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]), strict=True):
        worker.complete(claim, answer(claim, version=7, rewards=rewards))
    result = evaluation.look()
    assert result is not None
    assert (result.step, result.replicates, result.failed) == (7, 2, {})
    assert result.figures["pass@1"].value == pytest.approx(0.5)
    assert result.figures["pass@2"].value == pytest.approx(0.75)
    assert result.figures["pass_ordered@1"].value == pytest.approx(0.5)
    assert {task: figures["pass@1"].value for task, figures in result.tasks.items()} == {"even": 0.75, "odd": 0.25}
    assert result.sources == {} and "by task: even 0.75, odd 0.25" in result.in_words()
    assert server.open_jobs == 0


def test_rows_with_a_data_source_are_summed_up_by_it_as_well(server: ServerQueue, worker: WorkerQueue) -> None:
    rows = [{"prompt": f"{n}", "task": "even", "data_source": f"made__{n % 2}"} for n in range(4)]
    evaluation = Evaluation(
        server,
        Judge(rule=AdvantageRule()),
        [Problem(row, row["task"]) for row in [*rows, {"prompt": "x", "task": "odd"}]],
        run_id=RUN,
        version=7,
        replicates=2,
        sampling=GREEDY,
        ks=(1,),
        seed=0,
    )
    result = finish(evaluation, worker, rewards={"1": [0.0, 0.0], "3": [0.0, 1.0]})
    found = {
        source: (figures["pass@1"].value, figures["pass@1"].problems) for source, figures in result.sources.items()
    }
    assert found == {"even/made__0": (1.0, 2), "even/made__1": (0.25, 2)}


def test_the_trainer_never_gets_a_group_of_an_evaluation(server: ServerQueue, worker: WorkerQueue) -> None:
    evaluation = begin(server)
    server.submit(make_job(0))
    evaluation.look()
    serve(worker)
    assert [name.seq for name in server.finished()] == [0]
    assert evaluation.look() is not None
    assert [name.seq for name in server.finished()] == [0]


def test_a_large_evaluation_leaves_room_in_the_queue_for_training(server: ServerQueue, worker: WorkerQueue) -> None:
    evaluation = begin(server, count=3 * OPEN_AT_A_TIME + 1)
    evaluation.look()
    assert server.open_jobs == OPEN_AT_A_TIME
    result = finish(evaluation, worker)
    assert result.figures["pass@1"].problems == 3 * OPEN_AT_A_TIME + 1


def test_a_completion_of_another_version_is_never_counted(server: ServerQueue, worker: WorkerQueue) -> None:
    result = finish(begin(server, count=1), worker, version=8)
    assert result.figures == {}
    assert result.failed == {"0": "it was answered by version [8], not 7"}


def test_a_problem_that_fails_is_named_and_the_others_are_reported(server: ServerQueue, worker: WorkerQueue) -> None:
    evaluation = begin(server, count=3)
    evaluation.look()
    for _ in range(3):  # attempts
        for claim in worker.claim(8):
            if claim.job.row["prompt"] == "1+1=":
                worker.fail(claim, "Traceback\nValueError: the reward does not know 1+1" + " or more" * 10**4)
            else:
                worker.complete(claim, answer(claim, version=7, rewards=[1.0, 1.0]))
    result = finish(evaluation, worker)
    assert result.failed["1"].startswith("ValueError: the reward does not know 1+1 or more")
    assert len(result.failed["1"]) <= 300, "many of them in a line of evaluations.jsonl could not be read again"
    assert result.figures["pass@1"].problems == 2


def test_a_problem_without_a_reward_is_named(server: ServerQueue, worker: WorkerQueue) -> None:
    rewards = {"0+0=": [float("nan"), 1.0], "1+1=": [float("-inf"), 1.0]}
    result = finish(begin(server, count=3), worker, rewards=rewards)
    assert result.failed == {
        "0": "ValueError: no reward function gave a reward for a completion",
        "1": "ValueError: the reward of a completion is infinite",
    }
    assert result.figures["pass@1"].problems == 1


def test_final_answers_of_any_kind_are_voted_on(server: ServerQueue, worker: WorkerQueue) -> None:
    judge = Judge(rule=AdvantageRule(), final_answer=lambda completion: [completion])  # type: ignore[arg-type,return-value]
    assert finish(begin(server, count=1, judge=judge), worker).figures["maj@2"].value == 1


def test_thresholds_and_final_answers_are_those_of_the_reward_functions(
    server: ServerQueue, worker: WorkerQueue
) -> None:
    def right(completions: list[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    right.success_threshold = 0.6  # type: ignore[attr-defined]
    right.final_answer = lambda completion: completion[-1]  # type: ignore[attr-defined]
    judge = Judge.of([right], AdvantageRule())
    result = finish(begin(server, count=1, judge=judge), worker, rewards={"0+0=": [0.5, 0.6]})
    assert result.figures["success_rate"].value == 0.5
    assert result.figures["maj@1"].value == 0
    assert Judge.of([lambda completions: []], AdvantageRule()).thresholds == {}


@pytest.mark.parametrize(
    ("rewards", "threshold", "headline"),
    [
        ([0.0, 1.0], None, "success_rate"),  # right or wrong
        ([0.2, 0.9], None, "reward_mean"),  # marks: no number of them is success
        ([0.0, 2.0], None, "reward_mean"),
        ([0.2, 0.9], 0.6, "success_rate"),
    ],
)
def test_the_headline_is_the_mean_reward_unless_it_is_known_what_success_is(
    server: ServerQueue, worker: WorkerQueue, rewards: list[float], threshold: float | None, headline: str
) -> None:
    judge = Judge(rule=AdvantageRule(), thresholds={} if threshold is None else {0: threshold})
    result = finish(begin(server, count=2, judge=judge), worker, rewards={f"{n}+{n}=": rewards for n in range(2)})
    assert result.headline == headline
    words = result.in_words()
    assert words.startswith("success rate 0.500 (95% interval" if headline == "success_rate" else "mean reward ")
    assert ("success" in words) is (headline == "success_rate")
    assert words.endswith("sampled with temperature 0.0, top_p 1.0, top_k 0")


def test_before_and_after_are_those_of_the_headline_and_an_accuracy_only_where_it_is_one(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    def kept(*rewards: float) -> dict[str, Any]:
        path = tmp_path / f"{rewards}.jsonl"
        with closing(EvaluationLedger(path, RUN, 0)) as ledger:
            for version, reward in enumerate(rewards):
                found = {f"{n}+{n}=": [reward, reward] for n in range(2)}
                ledger.add(finish(begin(server, count=2, version=version), worker, version=version, rewards=found))
        return before_and_after(path)

    how = {"evaluated_with": "temperature 0.0, top_p 1.0, top_k 0"}
    figures = {"evaluated": "reward_mean", "evaluated_before": 0.0, "evaluated_after": 0.9375}
    assert kept(0.0, 0.9375) == {**figures, **how}  # 0 alone could be an accuracy, 0.9375 is none
    accuracy = {"accuracy_before": 0.0, "accuracy_after": 1.0}
    known = {"evaluated": "success_rate", "evaluated_before": 0.0, "evaluated_after": 1.0}
    assert kept(0.0, 1.0) == {**known, **how, **accuracy}
    assert kept(1.0) == {}


def test_an_evaluation_that_nobody_asked_for_says_how_to_turn_it_off(messages: list[str]) -> None:
    found = [Problem(row, "") for row in problems(3)]
    say_what_is_evaluated(found, TrainingSettings())
    assert len(messages) == 1 and "answer its 3 problems" in messages[0]
    assert "--eval-every 0 turns this off" in messages[0]
    say_what_is_evaluated(found, TrainingSettings(eval_every=20))
    say_what_is_evaluated(found, TrainingSettings(eval_every=0))
    assert len(messages) == 1
    say_what_is_evaluated([], TrainingSettings(eval_every=20))
    assert "has no eval_dataset, so nothing is evaluated" in messages[1]


def test_duplicate_problems_are_warned_of(warnings: list[str]) -> None:
    found = [Problem(row, "") for row in problems(4)]
    warn_of_duplicates(found)
    assert warnings == []
    warn_of_duplicates([*found, found[0], Problem({**found[1].row}, "")])
    assert len(warnings) == 1 and "2 of the 6 problems of the eval_dataset are equal to an earlier one" in warnings[0]


def test_answers_that_were_sampled_otherwise_are_not_used_again(server: ServerQueue, worker: WorkerQueue) -> None:
    """Evaluations of one version differ by how they are sampled, in what a resume finds as well."""
    finished = []
    for eta, reward in ((0.1, 0.0), (0.5, 1.0)):
        evaluation = begin(server, sampling={**GREEDY, "eta": eta})
        assert evaluation.look() is None
        for claim in worker.claim(8):
            group = replace(answer(claim, version=7, rewards=[reward] * 2), metrics={DIVERGENCE: [eta, eta]})
            finished.append(group)
            worker.complete(claim, group)
        assert evaluation.look() is not None
    for eta, reward in ((0.5, 1.0), (0.1, 0.0)):
        result = begin(server, sampling={**GREEDY, "eta": eta}, finished=finished).look()
        assert result is not None
        assert (result.figures["reward_mean"].value, result.sampling["eta"]) == (reward, eta)
        assert result.figures["avg_kl"].value == pytest.approx(eta)
        assert f"avg_kl {eta:.3f}" in result.in_words()
    assert begin(server, sampling={**GREEDY, "eta": "off"}, finished=finished).done == 0


def test_a_server_that_is_killed_begins_its_evaluation_again(tmp_path: Path) -> None:
    root = tmp_path / "q"
    first = ServerQueue.open(root, RUN, watch_workers=False)
    worker = WorkerQueue.open(root, 1, "cpu")
    begin(first, count=4).look()
    [late] = worker.claim(1)
    [done] = worker.claim(1)
    worker.complete(done, answer(done, version=7, rewards=[0.0, 0.0]))
    first._lock.release()  # what the kernel does for a killed process
    with closing(ServerQueue.open(root, RUN, watch_workers=False)) as second, closing(worker):
        evaluation = begin(second, count=4)
        assert evaluation.look() is None
        worker.complete(late, answer(late, version=7, rewards=[0.0, 0.0]))  # of the weights of the dead server
        result = finish(evaluation, worker)
        assert result.figures["pass@1"].value == 1
        assert (second.healing.unknown, second.healing.duplicates) == (0, 0)
        assert not any((root / "quarantine").iterdir())
        assert not any((root / "queue").iterdir())


def test_an_evaluation_of_a_dead_server_that_is_given_back_late_is_asked_of_nobody(tmp_path: Path) -> None:
    root = tmp_path / "q"
    first = ServerQueue.open(root, RUN, watch_workers=False)
    begin(first, count=1, version=40).look()
    with closing(WorkerQueue.open(root, 1, "cpu")) as worker:
        [late] = worker.claim(1)
        first._lock.release()  # what the kernel does for a killed process
        with closing(ServerQueue.open(root, RUN, watch_workers=False)) as second:
            worker.hand_back(late)
            second.finished()
            assert not any((root / "queue").iterdir()), "a worker would wait for version 40, and give nothing else back"


def test_an_evaluation_says_that_the_disk_is_full(
    server: ServerQueue, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def refuse(job: Job) -> None:
        raise DiskFullError("The disk is full: no room for the queue.")

    monkeypatch.setattr(server, "submit", refuse)
    evaluation = begin(server)
    assert [evaluation.look(), evaluation.look()] == [None, None]
    assert warnings == ["The disk is full: no room for the queue. The evaluation of version 7 waits for room."]


def test_evaluations_and_training_have_archives_of_the_same_size(server: ServerQueue, worker: WorkerQueue) -> None:
    for seq in range(3):
        server.submit(make_job(seq))
    serve(worker)
    for name in server.finished():
        server.take(name)
    finish(begin(server, count=5), worker)
    assert server.trim_done(2, consumed=range(3)) == 1 + 3
    kept = sorted(path.name[:10] for path in (server.root / "done").rglob("*.safetensors"))
    assert kept == ["0000000001", "0000000002", "9000000003", "9000000004"]


class Weights:
    """Published weights that the test advances."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.held: int | None = None

    def hold(self) -> int | None:
        self.held = self.version
        return self.held

    def release(self) -> None:
        self.held = None


def run_evaluations(
    server: ServerQueue,
    weights: Weights,
    path: Path,
    reported: list[int],
    *,
    every: int = 4,
    resumed_from: int = 0,
    first: bool = True,
) -> RunEvaluations:
    return RunEvaluations(
        weights,
        EvaluationLedger(path, RUN, resumed_from),
        lambda version: begin(server, count=2, version=version),
        every=every,
        first=first,
        report=lambda result: reported.append(result.step),
    )


@pytest.mark.parametrize(("first", "steps"), [(True, [0, 4, 8, 10]), (False, [4, 8, 10])])
def test_a_run_evaluates_before_every_n_steps_and_at_the_end_each_version_once(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path, first: bool, steps: list[int]
) -> None:
    weights, reported = Weights(), list[int]()
    evaluations = run_evaluations(server, weights, tmp_path / "evaluations.jsonl", reported, first=first)
    for version in range(11):
        weights.version = version
        evaluations.published(version, last=version == 10)
        assert weights.held == (version if version in steps else None)
        serve(worker, version=version)
        evaluations.look()
        assert weights.held is None
    evaluations.published(10, last=True)
    assert not evaluations.busy
    assert reported == steps
    assert [one.step for one in read(tmp_path / "evaluations.jsonl")] == steps


def test_an_evaluation_that_is_due_while_another_goes_on_is_skipped_and_said(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path, warnings: list[str]
) -> None:
    weights, reported = Weights(), list[int]()
    weights.version = 0
    evaluations = run_evaluations(server, weights, tmp_path / "evaluations.jsonl", reported, every=2)
    evaluations.published(0)
    for version in range(1, 5):  # trained on, and not published
        evaluations.published(version)
        evaluations.look()
    serve(worker, version=0)
    evaluations.look()
    weights.version = 6
    evaluations.published(6)
    serve(worker, version=6)
    evaluations.look()
    assert reported == [0, 6]
    assert "takes longer than 2 steps: that of version 2 is skipped" in warnings[0]
    assert len(warnings) == 1


def test_a_version_that_found_no_slot_is_not_evaluated_and_the_next_one_is(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    weights, reported = Weights(), list[int]()
    weights.version = 3
    evaluations = run_evaluations(server, weights, tmp_path / "evaluations.jsonl", reported)
    evaluations.published(4)
    assert (weights.held, evaluations.busy) == (None, False)
    weights.version = 5
    evaluations.published(5)
    serve(worker, version=5)
    evaluations.look()
    assert reported == [5]


def test_a_resumed_run_forgets_evaluations_of_versions_that_have_not_happened(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    path, weights, reported = tmp_path / "evaluations.jsonl", Weights(), list[int]()
    evaluations = run_evaluations(server, weights, path, reported)
    for version in (0, 4, 8):
        weights.version = version
        evaluations.published(version)
        serve(worker, version=version)
        evaluations.look()
    evaluations.close()
    with path.open("a") as file:
        file.write('{"step": "broken"}\n')
        file.write(json.dumps({**json.loads(path.read_text().splitlines()[0]), "run_id": "another"}) + "\n")
        file.write('{"half a li')
    again = run_evaluations(server, weights, path, reported, resumed_from=5)
    assert [one.step for one in read(path)] == [0, 4]
    for weights.version in (5, 6, 7):  # a resume is no reason for one more
        again.published(weights.version)
        assert not again.busy
    weights.version = 8
    again.published(8)
    assert again.busy


def test_an_evaluation_that_was_lost_with_its_server_is_made_up_for(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path
) -> None:
    path, weights = tmp_path / "evaluations.jsonl", Weights()
    first = run_evaluations(server, weights, path, [])
    weights.version = 0
    first.published(0)
    serve(worker, version=0)
    first.look()
    weights.version = 4
    first.published(4)
    first.close()
    weights.version = 5
    again = run_evaluations(server, weights, path, [], resumed_from=5)
    again.published(5)
    assert again.busy


def test_a_run_that_ends_without_the_evaluation_of_its_last_version_says_so(
    server: ServerQueue, worker: WorkerQueue, tmp_path: Path, warnings: list[str]
) -> None:
    weights = Weights()
    evaluations = run_evaluations(server, weights, tmp_path / "evaluations.jsonl", [])
    weights.version = 4
    evaluations.published(4, last=True)
    evaluations.say_missing(4)
    serve(worker, version=4)
    evaluations.look()
    evaluations.say_missing(4)
    assert len(warnings) == 1 and "the last version, 4, has no evaluation" in warnings[0]


def test_without_evaluations_nothing_is_held(server: ServerQueue, tmp_path: Path) -> None:
    weights = Weights()
    weights.version = 0
    evaluations = run_evaluations(server, weights, tmp_path / "evaluations.jsonl", [], every=0)
    evaluations.published(0)
    assert weights.held is None
    assert not evaluations.busy
