"""Plans, the rows that are made of their continuations, and the files of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.errors import BadFileError, UsageError
from async_grpo_experiments.algorithms.dpo import DPO, DPOSettings
from async_grpo_experiments.algorithms.pita import PITA, PITASettings
from async_grpo_experiments.algorithms.protocols import (
    AlgorithmSettings,
    Continuations,
    Cut,
    HeadSettings,
    PreferenceSettings,
    collect,
    configured,
)
from async_grpo_experiments.algorithms.rows import (
    Preferences,
    Rows,
    best_and_worst,
    pairs_of,
    pairs_plan,
    preferable,
    row_of,
)

PAIRS = PreferenceSettings(reference="m", samples_per_example=3)


def answer(cuts: list[Cut]) -> list[Continuations]:
    """Five tokens for every completion, the greedy ones zeros; the reward is the sum of the text."""
    found = []
    for cut in cuts:
        own = tuple(0 if cut.greedy else cut.problem + 1 for _ in range(5 - len(cut.prefix)))
        reward = float(sum(cut.prefix + own))
        found.append(Continuations(cut=cut, prompt=(9,), completions=(own,) * cut.count, rewards=(reward,) * cut.count))
    return found


def test_a_plan_of_pairs_cuts_each_roll_in_and_answers_it_greedily_and_sampled() -> None:
    waves = []
    continuations = collect(pairs_plan(PAIRS, 2, 2), lambda cuts: (waves.append(cuts), answer(cuts))[1])
    assert waves[0] == [Cut(problem=problem, greedy=True, guided=True) for problem in (0, 1)]
    found = list(pairs_of(continuations))
    assert [pair.cut.problem for pair in found] == [0, 0, 0, 1, 1, 1]
    assert {len(pair.cut.prefix) for pair in found} <= set(range(5))
    assert all(set(pair.completions[0]) == {0} != set(pair.completions[1]) for pair in found), "the greedy one first"
    assert not any(cut.guided for cut in waves[1])
    assert waves == [waves[0], next_wave(waves[0])], "the same seed cuts at the same positions"
    assert next_wave(waves[0], round_number=3) != waves[1], "another round cuts at others"


def test_a_pair_of_which_one_has_failed_is_left_out() -> None:
    whole = collect(pairs_plan(PAIRS, 2, 1), answer)
    pairs = list(pairs_of(whole))
    for failed in range(len(whole)):
        left = list(pairs_of(whole[:failed] + whole[failed + 1 :]))
        assert left == pairs[: failed // 2] + pairs[failed // 2 + 1 :]


def next_wave(first: list[Cut], round_number: int = 2) -> list[Cut]:
    plan = pairs_plan(PAIRS, 2, round_number)
    next(plan)
    return plan.send(answer(first))


def test_preferences_follow_bradley_and_terry() -> None:
    soft = replace(PAIRS, bradley_terry_sampling=False, bradley_terry_beta=2.0)
    assert Preferences(soft, 1).chance(0, 1.0, 0.5) == pytest.approx(0.7310585786)
    drawing = Preferences(replace(soft, bradley_terry_sampling=True), 1)
    drawn = [drawing.chance(0, 1.0, 0.5) for _ in range(2000)]
    assert set(drawn) == {0.0, 1.0} and np.mean(drawn) == pytest.approx(0.731, abs=0.03)


@pytest.mark.parametrize("kind", [DPO, PITA])
def test_a_round_that_is_made_again_has_the_same_preferences_and_another_one_others(kind: Any) -> None:
    settings = {DPO: DPOSettings, PITA: PITASettings}[kind](reference="m", bradley_terry_beta=0.1)
    pairs = collect(pairs_plan(settings, 20, 1), answer)

    def preferred(round_number: int, continuations: list[Continuations]) -> list[tuple[int, object]]:
        items = kind(settings).rows(continuations, round_number).items
        return [(row.problem, (row.prefix, row.continuation)) for row in items if row.label == 1]

    first = preferred(1, pairs)
    assert preferred(1, pairs) == first != preferred(2, pairs)
    without = [found for found in pairs if found.cut.problem != 3]
    assert preferred(1, without) == [row for row in first if row[0] != 3], "one that fails changes no other"
    assert kind(settings).rows(pairs) == kind(settings).rows(pairs, 1)


@pytest.mark.parametrize(
    ("correct", "scores", "preferred"),
    [
        ((), (), (0.25, 1.0)),
        ((), (3.0, 2.0), (3.0, 2.0)),
        ((False, True), (), (0.0, 5.0)),
        ((False, True), (3.0, 2.0), (3.0, 7.0)),
    ],
)
def test_what_is_right_gets_a_bonus(correct: tuple[bool, ...], scores: tuple[float, ...], preferred: object) -> None:
    two = {"completions": ((1,), (2,)), "rewards": (0.25, 1.0)}
    found = Continuations(cut=Cut(problem=0), prompt=(), correct=correct, scores=scores, **two)
    assert preferable(found, PAIRS) == preferred


def test_best_and_worst_of_each_group_are_a_pair_and_ties_are_counted(messages: list[str]) -> None:
    def group(problem: int, *rewards: float) -> Continuations:
        tokens = tuple((token,) for token in range(len(rewards)))
        return Continuations(cut=Cut(problem=problem), prompt=(9,), completions=tokens, rewards=rewards)

    certain = replace(PAIRS, bradley_terry_sampling=False)
    rows = best_and_worst([group(0, 0.5, 0.0, 1.0, 0.0), group(1, 1.0, 1.0)], certain)
    assert messages == ["1 of 2 pairs left out: all of its rewards are equal."]
    assert [(row.group, row.continuation, row.label) for row in rows.items] == [(0, (2,), 1.0), (0, (1,), 0.0)]
    assert rows.dropped == 1
    with pytest.raises(UsageError, match="nothing to learn: each of the 1 pair has one reward"):
        best_and_worst([group(1, 1.0, 1.0)], certain)


def test_each_cut_of_a_problem_has_a_draw_of_its_own() -> None:
    cuts = [Cut(problem=0, prefix=(token,)) for token in range(400)]
    found = [Continuations(cut=cut, prompt=(9,), completions=((1,), (2,)), rewards=(1.0, 0.0)) for cut in cuts]
    chosen = [row.continuation == (1,) for row in best_and_worst(found, PAIRS).items if row.label == 1]
    assert np.mean(chosen) == pytest.approx(0.731, abs=0.07)


def test_rows_are_what_their_file_holds(tmp_path: Path) -> None:
    cut = Cut(problem=3, prefix=(1,), count=2)
    found = Continuations(cut=cut, prompt=(9, 8), completions=((2, 3), ()), rewards=(0.0, 1.0))
    rows = Rows((row_of(found, 0, 1.0), row_of(found, 0, 0.25, 1)), dropped=2)
    both = Rows.together([rows, rows])
    both.save(tmp_path / "rows.arrow")
    assert Rows.load(tmp_path / "rows.arrow") == both
    assert [len(group) for group in both.groups()] == [2, 2] and both.dropped == 4
    assert (rows.items[0].tokens, rows.items[0].unlabelled) == ((9, 8, 1, 2, 3), 3)
    whole = (tmp_path / "rows.arrow").read_bytes()
    (tmp_path / "half.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadFileError, match=r"half\.arrow is not an arrow file of rows"):
        Rows.load(tmp_path / "half.arrow")


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        (AlgorithmSettings, {"batchsize": 8}, "has an unknown field 'batchsize'; the nearest is 'batch_size'"),
        (AlgorithmSettings, {"batch_size": "abc"}, 'batch_size is "abc", not an integer'),
        (AlgorithmSettings, {"batch_size": 10}, "multiple of micro_batch_size 4.*set batch_size to 8 or 12"),
        (AlgorithmSettings, {"lr": 0}, "lr must be over 0, got 0"),
        (PreferenceSettings, {"bradley_terry_beta": 0}, "bradley_terry_beta must be over 0, got 0"),
        (HeadSettings, {"samples_per_example": 0}, "samples_per_example must be over 0, got 0"),
        (HeadSettings, {"num_atoms": 1}, "num_atoms must be at least 2, for V_min and V_max, got 1"),
    ],
)
def test_a_wrong_key_of_an_algorithm_is_named(kind: Any, values: dict[str, object], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        configured(kind, {"reference": "m", **values})
