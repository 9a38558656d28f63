"""An evaluation over a real queue: the test plays the workers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import EarlyStoppingCallback

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.errors import DiskFullError
from async_grpo.evals import early_stopping
from async_grpo.evals.eval_ledger import Evaluated, EvaluationLedger, Judge, before_and_after, read
from async_grpo.evals.evaluation import (
    OPEN_AT_A_TIME,
    Evaluation,
    Problem,
    RunEvaluations,
    say_what_is_evaluated,
    warn_of_duplicates,
)
from async_grpo.queue import Claim, ServerQueue, WorkerQueue
from async_grpo.records import DIVERGENCE, Job, RolloutGroup
from async_grpo.settings import TrainingSettings
from kit.groups import RUN, make_group, make_job

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
RULE = AdvantageRule()


def problems(count: int) -> list[Problem]:
    tasks = ("even", "odd")
    return [Problem({"prompt": f"{n}+{n}=", "task": tasks[n % 2]}, tasks[n % 2]) for n in range(count)]


def answer(claim: Claim, *rewards: float, version: int = 7) -> RolloutGroup:
    given = np.array([[reward] for reward in rewards], np.float32)
    texts = [f"answer {index}" for index in range(len(rewards))]
    return make_group(claim.job, version, attempt=claim.attempt, rewards=given, completions=texts)


def begin(server: ServerQueue, count: int = 4, version: int = 7, judge: Judge | None = None, **more: Any) -> Evaluation:
    given = {"replicates": 2, "sampling": GREEDY, "ks": (1, 2), "seed": 0, "trainer_state": {"max_steps": 9}, **more}
    rows = given.pop("problems", problems(count))
    return Evaluation(server, judge or Judge(rule=RULE), rows, run_id=RUN, version=version, **given)


class Yard:
    """A queue, evaluations of it, and a worker that the test plays."""

    def __init__(self, root: Path) -> None:
        self.server = ServerQueue.open(root, RUN, watch_workers=False)
        self.worker = WorkerQueue.open(root, 1, "cpu")

    def begin(self, count: int = 4, **more: Any) -> Evaluation:
        return begin(self.server, count, **more)

    def serve(self, version: int = 7, rewards: dict[str, list[float]] | None = None) -> int:
        """Answer everything that is pending; a prompt that `rewards` does not have is answered right, twice."""
        done = 0
        while claims := self.worker.claim(1):
            found = (rewards or {}).get(claims[0].job.row["prompt"], [1.0, 1.0])
            self.worker.complete(claims[0], answer(claims[0], *found, version=version))
            done += 1
        return done

    def finish(self, evaluation: Evaluation, **how: Any) -> Evaluated:
        for _ in range(100):
            result = evaluation.look()
            if result is not None:
                return result
            assert self.serve(**how), "the evaluation waits, and no job is pending"
        raise AssertionError("the evaluation does not end")


@pytest.fixture
def yard(tmp_path: Path) -> Iterator[Yard]:
    yard = Yard(tmp_path / "q")
    with closing(yard.server), closing(yard.worker):
        yield yard


def test_every_problem_is_answered_at_the_version_and_summed_up_by_task(yard: Yard) -> None:
    evaluation = yard.begin()
    assert evaluation.look() is None
    claims = yard.worker.claim(8)
    assert [(job.purpose, job.min_version, job.sampling, job.task) for job in (claim.job for claim in claims)] == [
        ("eval", 7, GREEDY, task) for task in ("even", "odd", "even", "odd")
    ]
    assert all(claim.job.trainer_state["max_steps"] == 9 for claim in claims), "a reward may divide by it"
    for claim, rewards in zip(claims, ([1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]), strict=True):
        yard.worker.complete(claim, answer(claim, *rewards))
    result = evaluation.look()
    assert (result.step, result.replicates, result.failed, result.sources) == (7, 2, {}, {})
    figures = {"pass@1": 0.5, "pass@2": 0.75, "pass_ordered@1": 0.5}
    assert {name: result.figures[name].value for name in figures} == pytest.approx(figures)
    assert {task: figures["pass@1"].value for task, figures in result.tasks.items()} == {"even": 0.75, "odd": 0.25}
    assert "by task: even 0.75, odd 0.25" in result.in_words()
    assert yard.server.open_jobs == 0


def test_rows_with_a_data_source_are_summed_up_by_it_as_well(yard: Yard) -> None:
    rows = [{"prompt": f"{n}", "task": "even", "data_source": f"made__{n % 2}"} for n in range(4)]
    given = [Problem(row, row["task"]) for row in [*rows, {"prompt": "x", "task": "odd"}]]
    result = yard.finish(yard.begin(problems=given), rewards={"1": [0.0, 0.0], "3": [0.0, 1.0]})
    found = {source: (it["pass@1"].value, it["pass@1"].problems) for source, it in result.sources.items()}
    assert found == {"even/made__0": (1.0, 2), "even/made__1": (0.25, 2)}


def test_the_trainer_never_gets_a_group_of_an_evaluation(yard: Yard) -> None:
    evaluation = yard.begin()
    yard.server.submit(make_job(0))
    evaluation.look()
    yard.serve()
    assert [name.seq for name in yard.server.finished()] == [0]
    assert evaluation.look() is not None
    assert [name.seq for name in yard.server.finished()] == [0]


def test_a_large_evaluation_leaves_room_in_the_queue_for_training(yard: Yard) -> None:
    evaluation = yard.begin(3 * OPEN_AT_A_TIME + 1)
    evaluation.look()
    assert yard.server.open_jobs == OPEN_AT_A_TIME
    assert yard.finish(evaluation).figures["pass@1"].problems == 3 * OPEN_AT_A_TIME + 1


def test_a_completion_of_another_version_is_never_counted(yard: Yard) -> None:
    result = yard.finish(yard.begin(1), version=8)
    assert (result.figures, result.failed) == ({}, {"0": "it was answered by version [8], not 7"})


def test_a_problem_that_fails_is_named_and_the_others_are_reported(yard: Yard) -> None:
    evaluation = yard.begin(3)
    evaluation.look()
    for _ in range(3):  # attempts
        for claim in yard.worker.claim(8):
            if claim.job.row["prompt"] == "1+1=":
                yard.worker.fail(claim, "Traceback\nValueError: the reward does not know 1+1" + " or more" * 10**4)
            else:
                yard.worker.complete(claim, answer(claim, 1.0, 1.0))
    result = yard.finish(evaluation)
    assert result.failed["1"].startswith("ValueError: the reward does not know 1+1 or more")
    assert len(result.failed["1"]) <= 300, "many of them in a line of evaluations.jsonl could not be read again"
    assert result.figures["pass@1"].problems == 2


def test_a_problem_without_a_reward_is_named(yard: Yard) -> None:
    rewards = {"0+0=": [float("nan"), 1.0], "1+1=": [float("-inf"), 1.0]}
    result = yard.finish(yard.begin(3), rewards=rewards)
    assert result.failed == {
        "0": "ValueError: no reward function gave a reward for a completion",
        "1": "ValueError: the reward of a completion is infinite",
    }
    assert result.figures["pass@1"].problems == 1


def test_final_answers_of_any_kind_are_voted_on(yard: Yard) -> None:
    judge = Judge(rule=RULE, final_answer=lambda completion: [completion])
    assert yard.finish(yard.begin(1, judge=judge)).figures["maj@2"].value == 1


def test_thresholds_and_final_answers_are_those_of_the_reward_functions(yard: Yard) -> None:
    def right(completions: list[str], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    right.success_threshold = 0.6
    right.final_answer = lambda completion: completion[-1]
    result = yard.finish(yard.begin(1, judge=Judge.of([right], RULE)), rewards={"0+0=": [0.5, 0.6]})
    assert (result.figures["success_rate"].value, result.figures["maj@1"].value) == (0.5, 0)
    assert Judge.of([lambda completions: []], RULE).thresholds == {}


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
    yard: Yard, rewards: list[float], threshold: float | None, headline: str
) -> None:
    judge = Judge(rule=RULE, thresholds={} if threshold is None else {0: threshold})
    result = yard.finish(yard.begin(2, judge=judge), rewards={f"{n}+{n}=": rewards for n in range(2)})
    words = result.in_words()
    assert result.headline == headline
    assert words.startswith("success rate 0.500 (95% interval" if headline == "success_rate" else "mean reward ")
    assert ("success" in words) is (headline == "success_rate")
    assert words.endswith("sampled with temperature 0.0, top_p 1.0, top_k 0")


def test_before_and_after_are_those_of_the_headline_and_an_accuracy_only_where_it_is_one(
    yard: Yard, tmp_path: Path
) -> None:
    def kept(*rewards: float) -> dict[str, Any]:
        path = tmp_path / f"{rewards}.jsonl"
        with closing(EvaluationLedger(path, RUN, 0)) as ledger:
            for version, reward in enumerate(rewards):
                found = {f"{n}+{n}=": [reward, reward] for n in range(2)}
                ledger.add(yard.finish(yard.begin(2, version=version), version=version, rewards=found))
        return before_and_after(path)

    how = {"evaluated_with": "temperature 0.0, top_p 1.0, top_k 0"}
    figures = {"evaluated": "reward_mean", "evaluated_before": 0.0, "evaluated_after": 0.9375}
    assert kept(0.0, 0.9375) == {**figures, **how}  # 0 alone could be an accuracy, 0.9375 is none
    accuracy = {"accuracy_before": 0.0, "accuracy_after": 1.0}
    known = {"evaluated": "success_rate", "evaluated_before": 0.0, "evaluated_after": 1.0}
    assert kept(0.0, 1.0) == {**known, **how, **accuracy}
    assert kept(1.0) == {}


def test_an_evaluation_that_nobody_asked_for_says_how_to_turn_it_off(messages: list[str]) -> None:
    say_what_is_evaluated(problems(3), TrainingSettings())
    assert len(messages) == 1 and "answer its 3 problems" in messages[0]
    assert "--eval-every 0 turns this off" in messages[0]
    for asked in (20, 0):
        say_what_is_evaluated(problems(3), TrainingSettings(eval_every=asked))
    assert len(messages) == 1
    say_what_is_evaluated([], TrainingSettings(eval_every=20))
    assert "has no eval_dataset, so nothing is evaluated" in messages[1]


def test_duplicate_problems_are_warned_of(warnings: list[str]) -> None:
    warn_of_duplicates(problems(4))
    assert warnings == []
    warn_of_duplicates([*problems(4), *problems(2)])
    assert len(warnings) == 1 and "2 of the 6 problems of the eval_dataset are equal to an earlier one" in warnings[0]


def test_answers_that_were_sampled_otherwise_are_not_used_again(yard: Yard) -> None:
    """Evaluations of one version differ by how they are sampled, in what a resume finds as well."""
    finished = []
    for eta, reward in ((0.1, 0.0), (0.5, 1.0)):
        evaluation = yard.begin(sampling={**GREEDY, "eta": eta})
        assert evaluation.look() is None
        for claim in yard.worker.claim(8):
            group = replace(answer(claim, reward, reward), metrics={DIVERGENCE: [eta, eta]})
            finished.append(group)
            yard.worker.complete(claim, group)
        assert evaluation.look() is not None
    for eta, reward in ((0.5, 1.0), (0.1, 0.0)):
        result = yard.begin(sampling={**GREEDY, "eta": eta}, finished=finished).look()
        assert (result.figures["reward_mean"].value, result.sampling["eta"]) == (reward, eta)
        assert result.figures["avg_kl"].value == pytest.approx(eta)
        assert f"avg_kl {eta:.3f}" in result.in_words()
    assert yard.begin(sampling={**GREEDY, "eta": "off"}, finished=finished).done == 0


def another_server(yard: Yard) -> ServerQueue:
    """The one of `yard` is killed: the kernel releases its lock."""
    yard.server._lock.release()
    return ServerQueue.open(yard.server.root, RUN, watch_workers=False)


def test_a_server_that_is_killed_begins_its_evaluation_again(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "q")
    yard.begin().look()
    [late] = yard.worker.claim(1)
    [done] = yard.worker.claim(1)
    yard.worker.complete(done, answer(done, 0.0, 0.0))
    with closing(another_server(yard)) as second, closing(yard.worker):
        evaluation = begin(second)
        assert evaluation.look() is None
        yard.worker.complete(late, answer(late, 0.0, 0.0))  # of the weights of the dead server
        assert yard.finish(evaluation).figures["pass@1"].value == 1
        assert (second.healing.unknown, second.healing.duplicates) == (0, 0)
        assert not any((second.root / "quarantine").iterdir())
        assert not any((second.root / "queue").iterdir())


def test_an_evaluation_of_a_dead_server_that_is_given_back_late_is_asked_of_nobody(tmp_path: Path) -> None:
    yard = Yard(tmp_path / "q")
    yard.begin(1, version=40).look()
    [late] = yard.worker.claim(1)
    with closing(another_server(yard)) as second, closing(yard.worker):
        yard.worker.hand_back(late)
        second.finished()
        waits = "a worker would wait for version 40, and give nothing else back"
        assert not any((second.root / "queue").iterdir()), waits


def test_an_evaluation_says_that_the_disk_is_full(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    def refuse(job: Job) -> None:
        raise DiskFullError("The disk is full: no room for the queue.")

    monkeypatch.setattr(yard.server, "submit", refuse)
    evaluation = yard.begin()
    assert [evaluation.look(), evaluation.look()] == [None, None]
    assert warnings == ["The disk is full: no room for the queue. The evaluation of version 7 waits for room."]


def test_evaluations_and_training_have_archives_of_the_same_size(yard: Yard) -> None:
    for seq in range(3):
        yard.server.submit(make_job(seq))
    yard.serve()
    for name in yard.server.finished():
        yard.server.take(name)
    yard.finish(yard.begin(5))
    assert yard.server.trim_done(2, consumed=range(3)) == 1 + 3
    kept = sorted(path.name[:10] for path in (yard.server.root / "done").rglob("*.safetensors"))
    assert kept == ["0000000001", "0000000002", "9000000003", "9000000004"]


@dataclass
class Weights:
    """Published weights that the test advances."""

    version: int | None = None
    held: int | None = None

    def hold(self) -> int | None:
        self.held = self.version
        return self.held

    def release(self) -> None:
        self.held = None


class Training:
    """A run that evaluates, on a yard."""

    def __init__(self, yard: Yard, path: Path) -> None:
        self.yard, self.path, self.weights = yard, path, Weights()
        self.reported: list[int] = []
        self.begins()

    def begins(self, *, every: int = 4, resumed_from: int = 0, first: bool = True) -> None:
        self.evaluations = RunEvaluations(
            self.weights,
            EvaluationLedger(self.path, RUN, resumed_from),
            lambda version: self.yard.begin(2, version=version),
            every=every,
            first=first,
            report=lambda result: self.reported.append(result.step),
        )

    def publishes(self, version: int, *, last: bool = False) -> None:
        self.weights.version = version
        self.evaluations.published(version, last=last)

    def is_answered(self, version: int) -> None:
        self.yard.serve(version)
        self.evaluations.look()


@pytest.fixture
def training(yard: Yard, tmp_path: Path) -> Training:
    return Training(yard, tmp_path / "evaluations.jsonl")


@pytest.mark.parametrize(("first", "steps"), [(True, [0, 4, 8, 10]), (False, [4, 8, 10])])
def test_a_run_evaluates_before_every_n_steps_and_at_the_end_each_version_once(
    training: Training, first: bool, steps: list[int]
) -> None:
    training.begins(first=first)
    for version in range(11):
        training.publishes(version, last=version == 10)
        assert training.weights.held == (version if version in steps else None)
        training.is_answered(version)
        assert training.weights.held is None
    training.evaluations.published(10, last=True)
    assert not training.evaluations.busy
    assert training.reported == [one.step for one in read(training.path)] == steps


def test_an_evaluation_that_is_due_while_another_goes_on_is_skipped_and_said(
    training: Training, warnings: list[str]
) -> None:
    training.begins(every=2)
    training.publishes(0)
    for version in range(1, 5):  # trained on, and not published
        training.evaluations.published(version)
        training.evaluations.look()
    training.is_answered(0)
    training.publishes(6)
    training.is_answered(6)
    assert training.reported == [0, 6]
    assert "takes longer than 2 steps: that of version 2 is skipped" in warnings[0]
    assert len(warnings) == 1


def test_a_version_that_found_no_slot_is_not_evaluated_and_the_next_one_is(training: Training) -> None:
    training.weights.version = 3
    training.evaluations.published(4)
    assert (training.weights.held, training.evaluations.busy) == (None, False)
    training.publishes(5)
    training.is_answered(5)
    assert training.reported == [5]


def test_a_resumed_run_forgets_evaluations_of_versions_that_have_not_happened(training: Training) -> None:
    path = training.path
    for version in (0, 4, 8):
        training.publishes(version)
        training.is_answered(version)
    training.evaluations.close()
    with path.open("a") as file:
        file.write('{"step": "broken"}\n')
        file.write(json.dumps({**json.loads(path.read_text().splitlines()[0]), "run_id": "another"}) + "\n")
        file.write('{"half a li')
    training.begins(resumed_from=5)
    assert [one.step for one in read(path)] == [0, 4]
    for version in (5, 6, 7):  # a resume is no reason for one more
        training.publishes(version)
        assert not training.evaluations.busy
    training.publishes(8)
    assert training.evaluations.busy


def test_an_evaluation_that_was_lost_with_its_server_is_made_up_for(training: Training) -> None:
    training.publishes(0)
    training.is_answered(0)
    training.publishes(4)
    training.evaluations.close()
    training.begins(resumed_from=5)
    training.publishes(5)
    assert training.evaluations.busy


def test_a_run_that_ends_without_the_evaluation_of_its_last_version_says_so(
    training: Training, warnings: list[str]
) -> None:
    training.publishes(4, last=True)
    training.evaluations.say_missing(4)
    training.is_answered(4)
    training.evaluations.say_missing(4)
    assert len(warnings) == 1 and "the last version, 4, has no evaluation" in warnings[0]


def test_without_evaluations_nothing_is_held(training: Training) -> None:
    training.begins(every=0)
    training.publishes(0)
    assert (training.weights.held, training.evaluations.busy) == (None, False)


# --- When evaluations no longer improve: -------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_early_stopping_is_that_of_transformers(patience: int, threshold: float) -> None:
    draw = random.Random(patience)
    for _ in range(50):
        values = [round(draw.random(), 1) for _ in range(12)]
        bests = [early_stopping.best_of(enumerate(values[: end + 1]), threshold) for end in range(12)]
        ours = next((end for end, best in enumerate(bests) if best.without >= patience), None)
        assert ours == stop_of_transformers(values, patience, threshold), values
        assert bests[-1].step == values.index(max(values))


def stop_of_transformers(values: list[float], patience: int, threshold: float) -> int | None:
    callback = EarlyStoppingCallback(patience, threshold)
    args = SimpleNamespace(metric_for_best_model="reward", greater_is_better=True)
    state, control = SimpleNamespace(best_metric=None), SimpleNamespace(should_training_stop=False)
    for at, value in enumerate(values):
        callback.on_evaluate(args, state, control, metrics={"eval_reward": value})
        if control.should_training_stop:
            return at
        state.best_metric = value if state.best_metric is None else max(value, state.best_metric)
    return None


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "evaluations.jsonl"
    watch = early_stopping.ImprovementWatch(file, 1, 0.0)
    assert watch.reason_to_stop() == ""
    lines = [json.dumps({"step": step, "figures": {"reward_mean": {"value": 0.5}}}) + "\n" for step in (0, 2)]
    file.write_text(lines[0] + lines[1][:30])
    assert watch.reason_to_stop() == "" and watch.look().step == 0
    file.write_text("".join(lines))
    once = "1 evaluation has not improved the mean reward by more than 0: the best was 0.500 at step 0"
    assert watch.reason_to_stop() == once
    with file.open("a") as more:
        more.write(lines[1])
    assert watch.reason_to_stop().startswith("2 evaluations in a row have not improved")
