"""The figures of a run: what is counted about rollouts, and what metrics.jsonl and the step line say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import TrainerState

from async_grpo.records import Timings
from async_grpo.rollout.worker import WorkerStatistics
from async_grpo.settings import TrainingSettings
from async_grpo.telemetry import run_log as metrics_module
from async_grpo.telemetry.run_log import LEGEND, REPLAY_LINE, RunLog
from async_grpo.telemetry.trackers import name_for_wandb, name_run
from async_grpo.training import rollout_metrics as rollout_metrics_module
from async_grpo.training.reporting import LogCallback
from async_grpo.training.rollout_metrics import RolloutMetrics, longer_half
from kit.groups import make_group, make_job


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (metrics_module, rollout_metrics_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


class Metrics(RolloutMetrics):
    """Keeps what it logs of each batch."""

    def __init__(self, workers: int) -> None:
        self.logged: dict[str, float] = {}
        super().__init__(self.logged.__setitem__)
        self.workers = workers


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[RunLog]:
    with closing(RunLog(tmp_path / "metrics.jsonl")) as log:
        yield log


def step_logs(reward: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"loss": 0.1, "reward": reward, **more}


# --- rollouts


def test_figures_of_a_batch(clock: Clock) -> None:
    metrics = Metrics(workers=2)
    metrics.training_begins()
    busy = Timings(adopt_s=0.5, generate_s=3.0, score_s=0.5)
    clock.now += 10.0
    metrics.waited(4.0)
    metrics.batch_taken([make_group(make_job(n, 5), version, timings=busy) for n, version in ((0, 7), (1, 4))], 7)
    assert metrics.logged == {
        "async/staleness_mean": 1.5,
        "async/staleness_max": 3,
        "async/rollouts_per_second": pytest.approx(1.0),
        "async/trainer_wait_fraction": pytest.approx(0.4),
        "async/overhead_fraction": pytest.approx(1.0 / 30.0),  # two groups' adoption, three processes, 10 s
        "async/worker_busy_fraction": pytest.approx(8.0 / 20.0),
    }


def test_long_completions_have_a_staleness_of_their_own() -> None:
    metrics = Metrics(workers=0)
    lengths = {7: [2, 3], 4: [9, 3]}  # by version; the median is 3, so one completion of four is longer
    groups = [
        make_group(make_job(number), version, completion_lengths=np.array(of_group, np.int32))
        for number, (version, of_group) in enumerate(lengths.items())
    ]
    metrics.batch_taken(groups, 8)
    assert metrics.logged["async/staleness_long"] == 4.0
    assert metrics.logged["async/staleness_short"] == pytest.approx((1 + 1 + 4) / 3)
    assert longer_half([3, 9, 5, 7]) == [False, True, False, True]


def test_workers_are_busy_with_groups_that_are_dropped_too(clock: Clock) -> None:
    metrics = Metrics(workers=1)
    metrics.training_begins()
    group = make_group(make_job(0), 0, timings=Timings(adopt_s=0.5, generate_s=1.5, queue_s=0.5))
    for dropped, busy, overhead in ((3, 0.8, 0.2), (0, 0.2, 0.05)):
        for _ in range(dropped):
            metrics.group_dropped(group)
        clock.now += 10.0
        metrics.batch_taken([group], 0)
        assert metrics.logged["async/worker_busy_fraction"] == pytest.approx(busy)
        assert metrics.logged["async/overhead_fraction"] == pytest.approx(overhead)
    assert metrics.totals()["worker_busy_fraction"] == 0.5


def test_totals_are_over_the_whole_training_and_leave_loading_out(clock: Clock) -> None:
    metrics = Metrics(workers=1)
    clock.now += 1000.0  # loading
    metrics.training_begins()
    for staleness in (0, 2):
        clock.now += 10.0
        metrics.waited(5.0)
        group = make_group(make_job(0, 4), 10 - staleness, timings=Timings(generate_s=2.5))
        metrics.batch_taken([group], 10)
    metrics.quarantined += 1
    metrics.group_dropped(group)
    assert metrics.totals() == {
        "rollouts": 8,
        "rollouts_per_second": 0.4,
        "staleness_mean": 1.0,
        "staleness_max": 2,
        "trainer_wait_fraction": 0.5,
        "worker_busy_fraction": 0.25,
        "overhead_fraction": 0.0,
        "jobs_quarantined": 1,
        "groups_dropped": 1,
    }


def test_totals_of_a_run_that_took_no_batch() -> None:
    totals = Metrics(workers=0).totals()
    assert totals["rollouts"] == totals["staleness_mean"] == totals["worker_busy_fraction"] == 0


def test_shares_never_exceed_one(clock: Clock) -> None:
    metrics = Metrics(workers=1)
    clock.now += 1.0
    metrics.waited(50.0)
    metrics.batch_taken([make_group(make_job(0), 0, timings=Timings(generate_s=70.0))], 0)
    logged, totals = metrics.logged, metrics.totals()
    assert logged["async/trainer_wait_fraction"] == logged["async/worker_busy_fraction"] == 1.0
    assert totals["trainer_wait_fraction"] == totals["worker_busy_fraction"] == 1.0


def test_a_worker_sums_up_what_it_did() -> None:
    statistics = WorkerStatistics()
    assert statistics.report().startswith("0 jobs, 0.00 jobs/s")
    statistics.jobs, statistics.failed = 3, 1
    for seconds in (0.1, 0.4, 0.1):
        statistics.generation.add(seconds)
    assert "3 jobs (1 failed)" in statistics.report()
    assert "generation 0.1000/0.2000/0.4000 s (min/mean/max)" in statistics.report()
    assert "scoring" not in statistics.report()


# --- metrics.jsonl and the step line


def test_each_call_of_log_is_one_line_of_json_at_once(tmp_path: Path, log: RunLog) -> None:
    log.logged(1, step_logs(0.25, note=Path("x")))
    log.logged(1, {"eval_runtime": 2.5, "eval_tool_runtime": 2.0, "eval_reward": 0.5})
    log.logged(1, {"eval_math_runtime": 2.5, "eval_reward": 0.5})
    at = {"step": 1, "monotonic_s": 100.0}
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {**at, "loss": 0.1, "reward": 0.25, "note": "x"},
        {**at, "eval_runtime": 2.5, "eval_tool_runtime": 2.0, "eval_reward": 0.5},
        {**at, "eval_set": "math", "eval_math_runtime": 2.5, "eval_reward": 0.5},
    ]


def test_the_step_line(log: RunLog, messages: list[str], clock: Clock) -> None:
    log.training_begins(10)
    log.logged(1, step_logs(0.25))
    clock.now += 6.0
    figures = {"rollouts_per_second": 41.7, "staleness_mean": 0.0, "queue_pending": 3.0, "queue_processing": 2.0}
    figures |= {"queue_complete": 0.0, "trainer_wait_fraction": 0.314, "worker_busy_fraction": 1.0}
    of_trl = {"kl": 0.0123, "learning_rate": 2.5e-6, "grad_norm": 0.456}
    log.logged(3, step_logs(0.75, **of_trl, **{f"async/{name}": value for name, value in figures.items()}))
    log.logged(3, {"eval_reward": 0.5}, "temperature 1, top_p 0.9")
    log.logged(3, {"eval_math_runtime": 2.5, "eval_reward": 0.5})
    log.logged(3, {"eval_reward": None})  # no function gave a number
    log.logged(10, {"train_runtime": 12.0})  # the trainer's closing totals are no step
    assert messages == [
        LEGEND,
        "step 1/10 ETA ?  reward 0.250  loss +0.1",
        "step 3/10 ETA 21 s  reward 0.750  42 rollouts/s  staleness 0.0  loss +0.1  KL 0.012  lr 2.5e-06  "
        "grad norm 0.46  queue 3/2/0  trainer waits 31%  workers busy 100%",
        "TRL's own evaluation at step 3: mean reward 0.500, sampled with temperature 1, top_p 0.9",
        "TRL's own evaluation of math at step 3: mean reward 0.500",
    ]


def test_the_step_line_has_the_rewards_of_tasks_and_what_the_critic_knows(log: RunLog, messages: list[str]) -> None:
    log.training_begins(10)
    of_tasks = {"math/reward": 0.554, "math/math__gsm/reward": 0.5, "code/reward": 0.271, "rewards/f/mean": 0.4}
    log.logged(1, step_logs(0.412, **of_tasks, **{"critic/vf_explained_var": 0.612, "critic/rewards/mean": 0.4}))
    assert messages[1] == "step 1/10 ETA ?  reward 0.412 (math 0.55, code 0.27)  vf_explained_var 0.61  loss +0.1"


def test_the_step_line_of_a_replay_tells_of_the_new_policy_and_nothing_of_the_archive(
    tmp_path: Path, messages: list[str], clock: Clock
) -> None:
    with closing(RunLog(tmp_path / "metrics.jsonl", REPLAY_LINE)) as log:
        log.training_begins(10)
        figures = {"clip_ratio/region_mean": 0.0123, "async/kl_to_sampler": 0.00149, "async/staleness_mean": 1.0}
        log.logged(1, step_logs(0.25, **figures, **{"async/ratio_min": 0.5, "async/ratio_max": 2.0}))
        log.logged(2, {"loss": -0.5})  # the second step on a batch
    assert messages == [
        "step 1/10 ETA ?  loss +0.1  clipped 1.2%  KL to the sampler 0.0015  probability ratios 0.50 to 2.00",
        "step 2/10 ETA 0 s  loss -0.5",
    ]


def test_each_optimizer_step_has_one_line_whether_the_trainer_logs_it_or_not(
    tmp_path: Path, messages: list[str], log: RunLog
) -> None:
    latest: dict[str, float] = {}
    callback = LogCallback(log, lambda: latest)
    state = TrainerState(max_steps=13, global_step=10)
    callback.on_train_begin(None, state, None)
    for step, logged in ((11, False), (12, True), (13, False)):
        callback.on_step_begin(None, state, None)
        state.global_step, latest["reward"] = step, step / 100
        if logged:
            callback.on_log(None, state, None, logs=step_logs(0.5))
    callback.on_train_end(None, state, None)
    assert [line.split(" ETA")[0] for line in messages] == [LEGEND, "step 11/13", "step 12/13", "step 13/13"]
    assert messages[1].endswith("reward 0.110") and messages[2].endswith("reward 0.500  loss +0.1")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_the_summary_quotes_the_first_and_the_last_and_only_what_there_is(log: RunLog) -> None:
    assert log.quotes() == {}
    log.logged(0, {"eval_rewards/accuracy/mean": 0.12345})
    for reward in (0.1, 0.9, 0.5):
        log.logged(1, step_logs(reward))
    assert log.quotes() == {"reward_first": 0.1, "reward_last": 0.5, "accuracy_before": 0.1235}
    for accuracy in (0.5, 0.6):
        log.logged(3, {"eval_rewards/accuracy/mean": accuracy})
    assert log.quotes()["accuracy_after"] == 0.6


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), True])
def test_the_summary_quotes_numbers_only(log: RunLog, reward: float) -> None:
    log.logged(1, step_logs(reward))
    assert log.quotes() == {}
    log.logged(2, step_logs(np.float64(0.5)))
    assert log.quotes() == {"reward_first": 0.5, "reward_last": 0.5}


def test_a_resumed_run_remembers_what_was_before_and_goes_on_in_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with closing(RunLog(path)) as first:
        first.logged(0, {"eval_rewards/accuracy/mean": 0.2})
        first.logged(0, {"eval_math_runtime": 2.5, "eval_reward": 0.4, "eval_rewards/accuracy/mean": 0.4})
        first.logged(1, step_logs(0.1))
    with closing(RunLog(path)) as second:
        second.logged(2, step_logs(0.7))
        second.logged(2, {"eval_rewards/accuracy/mean": 0.8})
        second.logged(2, {"eval_math_runtime": 2.5, "eval_reward": 0.9, "eval_rewards/accuracy/mean": 0.9})
    of_math = {"accuracy_before/math": 0.4, "accuracy_after/math": 0.9}
    rewards = {"reward_first": 0.1, "reward_last": 0.7}
    assert second.quotes() == {**rewards, "accuracy_before": 0.2, "accuracy_after": 0.8, **of_math}
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 0, 1, 2, 2, 2]


def test_a_line_that_a_crash_cut_off_does_not_prevent_resuming(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, **step_logs(0.1)}) + '\n{"step": 2, "lo')
    with closing(RunLog(path)) as log:
        log.logged(2, step_logs(0.7))
    with closing(RunLog(path)) as again:
        assert again.quotes() == {"reward_first": 0.1, "reward_last": 0.7}


@pytest.mark.parametrize(
    "broken", [b"\0" * 200, b"{nonsense}", b"[1]", b'"text"', b"[" * 100_000, b'{"loss": 1, "reward": "x"}']
)
def test_a_broken_line_costs_its_own_figures_only(tmp_path: Path, broken: bytes, messages: list[str]) -> None:
    """As a power cut leaves them: a resumed run must not end on what an earlier process logged."""
    path = tmp_path / "metrics.jsonl"
    first, third = (b'{"step": %d, "loss": 1, "reward": %.2f}' % given for given in ((1, 0.25), (3, 0.5)))
    path.write_bytes(b"\n".join([first, broken, third, b""]))
    with closing(RunLog(path)) as log:
        assert log.quotes() == {"reward_first": 0.25, "reward_last": 0.5}
    assert path.read_bytes().count(b"\n") == 3, "nothing of the file is thrown away"
    assert all("line 2" in text for text in messages)


# --- What W&B and trackio are told of a run; tests/with_trackers reads what their real clients make of it --------

NAMED = TrainingSettings(run_name="warm", run_group="seeds", run_tags=("a", "b"))


def trainer(*report_to: str) -> Any:
    return SimpleNamespace(args=SimpleNamespace(run_name="of the file", report_to=list(report_to)))


def test_options_override_the_setup_file_and_the_environment_and_nothing_else_does() -> None:
    environ = {"WANDB_TAGS": "old", "WANDB_PROJECT": "mine"}
    name_for_wandb(TrainingSettings(), environ)
    assert environ == {"WANDB_TAGS": "old", "WANDB_PROJECT": "mine"}
    name_for_wandb(NAMED, environ)
    assert environ == {"WANDB_TAGS": "a,b", "WANDB_PROJECT": "mine", "WANDB_NAME": "warm", "WANDB_RUN_GROUP": "seeds"}
    named = trainer("wandb")
    name_run(named, TrainingSettings())
    assert named.args.run_name == "of the file"
    name_run(named, NAMED)
    assert named.args.run_name == "warm"


def test_trackio_is_told_what_transformers_does_not_pass_on(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[dict[str, Any]]()
    trackio = SimpleNamespace(init=lambda **how: begun.append(how))
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    name_run(trainer("trackio"), NAMED)
    trackio.init(project="p", name="warm")
    assert begun == [{"project": "p", "name": "warm", "group": "seeds", "config": {"tags": ["a", "b"]}}]


def test_a_group_that_nobody_is_told_is_said(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    name_run(trainer("tensorboard"), NAMED)
    assert "report_to of the GRPOConfig names neither" in warnings[0]
