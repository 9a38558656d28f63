"""The statistics of sweeps, against values that were computed by hand or by scipy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sweep_yard import SweepYard

from async_grpo.errors import UsageError
from async_grpo.evals.estimators import range_of
from async_grpo.rundir.paths import FAILED, RunDir, RunState
from async_grpo_experiments.sweeps.comparison import bootstrap, compare, in_words, sign_test, smallest_sign_test, welch
from async_grpo_experiments.sweeps.report import agree, first_figure
from async_grpo_experiments.sweeps.run_progress import Curves, FinishedRuns, Reason
from kit.plans import planned


def curves(by_problem: Mapping[str, float] | None = None, step: int = 10, value: float | None = None) -> Curves:
    values = by_problem or {}
    mean = float(np.mean([*values.values()])) if value is None else value
    found = {problem: [one, one] for problem, one in values.items()}
    return Curves(evaluations={0: {"success_rate": 0.1}, step: {"success_rate": mean}}, by_problem={step: found})


def side(name: str, runs: Mapping[int, Curves], *missing: str) -> FinishedRuns:
    return FinishedRuns(name=name, runs=runs, not_counted=dict.fromkeys(missing, "never started"))


def test_the_mean_over_seeds_has_students_interval_and_says_how_many() -> None:
    rows = agree({1: {0: 0.1, 10: 0.5}, 2: {0: 0.3, 10: 0.7}, 3: {0: 0.2}})
    assert [(row.step, row.n) for row in rows] == [(0, 3), (10, 2)]
    assert rows[0].mean == pytest.approx(0.2)
    assert rows[0].high == pytest.approx(0.2 + 4.302653 * 0.1 / 3**0.5)
    assert rows[1].low == pytest.approx(0.6 - 12.706205 * 0.1)
    assert rows[1].by_seed == {"1": 0.5, "2": 0.7}
    assert agree({1: {0: 0.5}})[0].low is None


def test_an_interval_over_seeds_is_cut_to_what_a_share_can_be() -> None:
    rows = agree({1: {0: 0.2}, 2: {0: 0.9}}, range_of("pass@5"))
    assert (rows[0].low, rows[0].high) == (0.0, 1.0)
    rows = agree({1: {0: 0.2}, 2: {0: 0.9}}, range_of("reward_mean"))
    assert rows[0].low is not None and rows[0].low < 0
    rows = agree({1: {0: 0.25}, 2: {0: 0.16}}, range_of("reward_std"))
    assert rows[0].low == 0 and rows[0].high is not None and rows[0].high > 0.7
    effect = compare(side("a", {1: curves(value=0.9), 2: curves(value=0.2)}), side("b", {1: curves(value=0.0)}))
    assert (effect.over_seeds.low, effect.over_seeds.high) == (None, None)
    pair = [side(name, {1: curves(value=one), 2: curves(value=two)}) for name, one, two in (("a", 1, 0), ("b", 0, 0.9))]
    effect = compare(*pair)
    assert (effect.over_seeds.low, effect.over_seeds.high) == (-1.0, 1.0)


def test_sweeps_begin_with_the_mean_reward_unless_all_runs_know_what_success_is() -> None:
    marks = Curves(evaluations={0: {"success_rate": 0.0, "reward_mean": 0.9}})
    right = replace(marks, headline="success_rate")
    assert first_figure([marks, marks]) == first_figure([marks, right]) == "reward_mean"
    assert first_figure([right, right]) == "success_rate"
    assert compare(side("a", {1: marks}), side("b", {1: right})).figure == "reward_mean"
    assert compare(side("a", {1: right}), side("b", {1: right})).figure == "success_rate"


def test_sweeps_of_the_same_seeds_are_paired() -> None:
    a = side("a", {seed: curves(value=0.5 + 0.1 * seed + 0.02 * (seed % 2)) for seed in range(4)})
    b = side("b", {seed: curves(value=0.5 + 0.1 * seed) for seed in range(4)})
    effect = compare(a, b)
    assert (effect.paired, effect.step, effect.seeds) == (True, 10, (0, 1, 2, 3))
    assert effect.over_seeds.value == pytest.approx(0.01)
    half = 3.182446 * 0.0115470 / 2
    assert effect.over_seeds.high == pytest.approx(0.01 + half, abs=1e-5)
    assert effect.over_problems is None


@pytest.mark.parametrize(("ends", "step", "says"), [((20, 30), 0, True), ((30, 30), 30, False)])
def test_a_step_before_training_is_not_taken_for_the_end(ends: tuple[int, int], step: int, says: bool) -> None:
    """Sweeps of 20 and 30 steps have only step 0 in common, where all differences are 0."""
    a, b = (side(name, {s: curves(value=0.5, step=end) for s in (1, 2)}) for name, end in zip("ab", ends, strict=True))
    effect = compare(a, b)
    mind = "Mind: step 0 is before training: the last evaluation of A is at step 20, of B at step 30."
    assert effect.step == step and (mind in list(in_words(effect, a, b))) == says


def test_seeds_that_only_one_side_has_are_named_and_left_out() -> None:
    a = side("a", {1: curves(value=0.5), 2: curves(value=0.6), 3: curves(value=0.9)}, "4")
    b = side("b", {1: curves(value=0.4), 2: curves(value=0.5)})
    effect = compare(a, b)
    assert effect.over_seeds.value == pytest.approx(0.1)
    words = "\n".join(in_words(effect, a, b))
    assert "not counted: seed 4 of A, never started" in words
    assert "not counted: seed 3 of A, which the other sweep lacks" in words


def test_sweeps_of_other_seeds_have_welchs_interval() -> None:
    from scipy import stats

    ours, theirs = [0.5, 0.7, 0.6], [0.4, 0.45, 0.41, 0.44]
    expected = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval()
    found = welch(ours, theirs)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    a = side("a", {seed: curves(value=value) for seed, value in enumerate(ours)})
    b = side("b", {seed + 9: curves(value=value) for seed, value in enumerate(theirs)})
    effect = compare(a, b)
    assert not effect.paired and effect.sign_test is None
    assert effect.over_seeds == found
    assert welch([0.5], [0.4]).low is None


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sweeps_whose_runs_all_reach_the_same_are_compared_without_a_warning_of_scipy() -> None:
    found = welch([1.0, 1.0], [0.5, 0.6])  # t = 12.7062 for one degree of freedom, standard error 0.05
    assert (found.low, found.high) == pytest.approx((0.45 - 12.7062 * 0.05, 0.45 + 12.7062 * 0.05), abs=1e-5)
    assert welch([1.0, 1.0], [0.5, 0.5]).low == 0.5


def test_the_bootstrap_over_problems_is_that_of_scipy() -> None:
    from scipy import stats

    differences = np.random.default_rng(1).normal(0.05, 0.2, size=200)
    expected = stats.bootstrap((differences,), np.mean, method="percentile", rng=2).confidence_interval
    found = bootstrap(differences)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.002)
    assert found == bootstrap(differences)


def test_only_problems_that_every_run_answered_are_bootstrapped() -> None:
    a = side("a", {seed: curves({"0": 1.0, "1": 0.5, "2": 0.9}) for seed in (1, 2)})
    b = side("b", {1: curves({"0": 0.5, "1": 0.5}), 2: curves({"0": 0.5, "1": 0.5, "9": 0.0})})
    found = compare(a, b).over_problems
    assert found is not None and found.problems == 2
    assert found.value == pytest.approx(0.25)
    assert (found.low, found.high) == pytest.approx((0.0, 0.5))


def test_four_seeds_cannot_be_significant_and_the_output_says_so() -> None:
    assert sign_test([0.1, 0.2, 0.1, 0.3]) == smallest_sign_test(4) == 0.125
    assert sign_test([0.1, 0.0, -0.1]) == 1.0
    a = side("a", {seed: curves(value=0.6) for seed in range(4)})
    b = side("b", {seed: curves(value=0.5) for seed in range(4)})
    words = "\n".join(in_words(compare(a, b), a, b))
    assert "With 4 seeds an exact sign test cannot go below 0.125" in words
    six = [side(name, {seed: curves(value=value) for seed in range(6)}) for name, value in (("a", 0.6), ("b", 0.5))]
    assert "cannot go below" not in "\n".join(in_words(compare(*six), *six))


def test_other_sampling_is_said() -> None:
    a = side("a", {1: Curves(evaluations={5: {"reward_mean": 0.5}}, sampling="with temperature 0.6")})
    b = side("b", {1: Curves(evaluations={5: {"reward_mean": 0.4}}, sampling="as in training")})
    words = "\n".join(in_words(compare(a, b), a, b))
    assert "Mind: A's completions were sampled with temperature 0.6, B's as in training." in words
    assert "Mind" not in "\n".join(in_words(compare(a, a), a, a))


def test_what_cannot_be_compared_by_problem_is_said() -> None:
    a = FinishedRuns(name="a", runs={1: curves(value=0.5), 2: curves(value=0.6)}, not_counted={}, dataset="gsm8k")
    b = side("b", {1: curves(value=0.4), 2: curves(value=0.5)})
    words = "\n".join(in_words(compare(a, b), a, b))
    assert "No interval over problems" in words and "A has --dataset gsm8k, B (none)" in words
    assert "--dataset" not in "\n".join(in_words(compare(b, b), b, b))


def test_a_step_that_not_all_runs_evaluated_is_refused() -> None:
    a, b = side("a", {1: curves(value=0.6)}), side("b", {1: curves(step=20, value=0.5)})
    assert compare(a, b).step == 0
    with pytest.raises(UsageError, match="The steps that all have: 0"):
        compare(a, b, step=10)
    with pytest.raises(UsageError, match="a has no finished run"):
        compare(side("a", {}), b)


# --- Why a seed failed is what its run has written, as far as it was written by this start -----------------------


@pytest.mark.parametrize("mode", ["async", "trl"])
def test_the_reason_is_the_run_s_own_and_of_this_start(yard: SweepYard, mode: str) -> None:
    [run] = yard.sweep(1, mode=mode).runs
    run.run_dir.mkdir(parents=True)

    def fails(why: str) -> None:
        if mode == "async":
            RunDir(run.run_dir).write_state(RunState(run_id="r", state=FAILED, plan=planned(), started="", why=why))
        else:
            progress: dict[str, Any] = {"state": "running", "step": 1, "total_steps": 5, "saved": 0, "why": why}
            (run.run_dir / "plain_trl.json").write_text(json.dumps(progress))

    reason = Reason(run)
    reason.begins()
    assert reason() == "", "it has not begun"
    fails("RuntimeError: the reward")
    assert reason() == "RuntimeError: the reward"
    reason.begins()
    assert reason() == "", "of the start before"
