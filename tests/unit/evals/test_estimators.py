"""Each figure of an evaluation against a slow and obvious way to compute it."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean

import pytest

from async_grpo.evals.estimators import (
    Answers,
    differences,
    estimates,
    majority_at_k,
    mean_with_interval,
    pass_at_k,
    problems_with_interval,
    range_of,
)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets_that_hold_a_success(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        completions = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(completions, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_more_completions_than_were_sampled_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pass@6 needs 1 <= k <= n"):
        pass_at_k(5, 2, 6)


def test_the_figures_that_depend_on_the_order_take_the_first_k() -> None:
    problem = Answers(
        rewards=[0.2, 1.0, 0.0, 0.4], successes=[False, True, False, False], finals=["7", "8", "7", None], task="sums"
    )
    found = {name: estimate.value for name, estimate in estimates([problem], [1, 2, 4]).items()}
    assert [found[f"pass_ordered@{k}"] for k in (1, 2, 4)] == [0, 1, 1]
    assert [found[f"mean@{k}"] for k in (1, 2, 4)] == pytest.approx([0.2, 0.6, 0.4])
    assert [found[f"best@{k}"] for k in (1, 2, 4)] == [0.2, 1, 1]
    assert [found[f"maj@{k}"] for k in (1, 2, 4)] == [0, 0, 0]  # of 7 and 8 the first wins, then 7 has two votes
    assert found["pass@1"] == found["success_rate"] == 0.25
    assert found["reward_mean"] == pytest.approx(0.4)
    assert found["reward_std"] == pytest.approx(math.sqrt(sum((r - 0.4) ** 2 for r in problem.rewards) / 3))


def test_the_commonest_answer_wins_and_completions_without_one_do_not_vote() -> None:
    finals, successes = [None, "a", "b", "b", None], [False, False, True, True, False]
    answers = Answers(rewards=[0.0] * 5, successes=successes, finals=finals)
    assert [majority_at_k(answers, k) for k in (5, 1)] == [1, 0]


def test_nobody_votes_where_final_answers_are_unknown() -> None:
    assert "maj@1" not in estimates([Answers(rewards=[1.0], successes=[True])], [1])


def test_nineteen_of_twenty_intervals_hold_the_true_mean() -> None:
    generator = random.Random(0)
    held = 0
    for _ in range(2000):
        estimate = mean_with_interval([generator.gauss(3.0, 2.0) for _ in range(6)])
        held += estimate.low <= 3.0 <= estimate.high
    assert 0.935 <= held / 2000 <= 0.965


def test_one_problem_has_no_interval() -> None:
    estimate = mean_with_interval([0.5])
    assert (estimate.value, estimate.low, estimate.high) == (0.5, None, None)


def test_avg_kl_is_a_mean_over_problems_where_all_of_them_have_it() -> None:
    sides = ([[1.0, 3.0], [2, 8]], [[0.5, 0.5], [1, 1]])
    guided = [Answers(rewards=[0.0] * 2, successes=[False] * 2, divergences=kl, lengths=n) for kl, n in sides]
    found = estimates(guided, [1])
    assert found["avg_kl"].value == pytest.approx((2.0 + 0.5) / 2)
    assert found["avg_kl"].low == 0, "no divergence is negative"
    assert found["avg_kl_per_token"].value == pytest.approx((4.0 / 10 + 1.0 / 2) / 2)
    assert "avg_kl" not in estimates([*guided, Answers(rewards=[0.0], successes=[False])], [1])


def test_a_paired_difference_is_narrower_than_its_parts_where_problems_differ() -> None:
    theirs = [0.1, 0.5, 0.9, 0.3]
    ours = [value + 0.05 for value in theirs]
    sides = ([Answers(rewards=[value], successes=[False]) for value in side] for side in (ours, theirs))
    difference = differences(*sides, [1])["reward_mean"]
    assert difference.value == pytest.approx(fmean(ours) - fmean(theirs))
    assert difference.high - difference.low < 1e-9


@pytest.mark.parametrize(("right", "n"), [(0, 2), (1, 3), (7, 20), (20, 20), (299, 300)])
def test_of_problems_that_are_right_or_wrong_the_interval_is_wilson_s(right: int, n: int) -> None:
    from scipy.stats import binomtest

    estimate = problems_with_interval([1.0] * right + [0.0] * (n - right), (0.0, 1.0))
    theirs = binomtest(right, n).proportion_ci(method="wilson")
    assert (estimate.low, estimate.high) == (pytest.approx(theirs.low), pytest.approx(theirs.high))
    assert estimate.value == right / n


def test_no_interval_of_a_share_leaves_what_can_occur() -> None:
    generator = random.Random(0)
    for _ in range(300):
        n = generator.randint(2, 6)
        rewards = [[float(generator.random() < 0.9) for _ in range(3)] for _ in range(n)]
        problems = [Answers(rewards=of, successes=[one == 1 for one in of], finals=["7", "8", "7"]) for of in rewards]
        for name, estimate in estimates(problems, [1, 3]).items():
            if estimate.low is not None and estimate.high is not None:
                assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1, name
        for name, estimate in differences(problems, problems[::-1], [1, 3]).items():
            assert range_of(name) is None or -1 <= estimate.low <= estimate.high <= 1, name


def test_a_reward_that_can_be_anything_has_an_interval_that_is_not_cut() -> None:
    problems = [Answers(rewards=[reward], successes=[False]) for reward in (0.0, 1.5)]
    assert estimates(problems, [1])["reward_mean"].low < 0
