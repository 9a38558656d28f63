"""What real stages make of the configuration, and of what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset
from experiment_yard import tree

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.protocols import Cut, PreferenceSettings
from async_grpo_experiments.algorithms.rows import preferable
from async_grpo_experiments.problems.table import load
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.sampled_answers import SampledAnswers
from async_grpo_experiments.runner.stage_settings import check, settings_of


def test_an_algorithm_gets_its_own_keys_over_the_shared_ones() -> None:
    config = checked(
        tree(
            algos={"QSharp": {"lr": 1e-3, "enabled": True}, "PITA": {"guidance": {"eta": 0.5}}},
            models={"tiny": {"ref": "reference", "value": "small"}},
            data_collection={"samples_per_example": 7, "bradley_terry_beta": 2.0},
            generation={"temperature": 0.9},
        )
    )
    qsharp, pita = (settings_of(config, algo, "tiny", 5) for algo in ("QSharp", "PITA"))
    assert (qsharp.lr, qsharp.samples_per_example, qsharp.temperature, qsharp.seed) == (1e-3, 7, 0.9, 5)
    assert (pita.value, pita.bradley_terry_beta, pita.guidance.strength) == ("small", 2.0, 0.5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algos": {"PITA": {"batchsize": 3}}}, "the nearest is 'batch_size'"),
        ({"algos": {"QSharp": {"loss_type": "bradley_terry"}}}, "take PITA"),
        ({"datasets": {"sums": {"source": "TLDR"}}}, "scored by a reward model"),
        ({"datasets": {"sums": {"source": "sum"}}}, "sum is not the name of a set"),
    ],
)
def test_what_an_algorithm_or_a_dataset_does_not_know_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(checked(tree(**keys)))


def test_cuts_are_answered_by_their_wave_and_place(tmp_path: Path) -> None:
    rows = [
        {"problem": 1, "wave": wave, "request": place, "prompt_ids": [9], "completion_ids": ids, "reward": reward}
        for wave, place, ids, reward in [(0, 0, [1, 2], 0.0), (1, 0, [1, 3], 1.0), (1, 1, [1, 2, 4], 0.5)]
    ]
    Dataset.from_list(rows).save_to_disk(tmp_path / "samples")
    answers = SampledAnswers(tmp_path / "samples", verified=False)
    assert [one.completions for one in answers.answer([Cut(problem=0), Cut(problem=1)])] == [((1, 2),)]
    second = answers.answer([Cut(problem=1, prefix=(1,)), Cut(problem=1, prefix=(1, 2))])
    assert [(one.completions, one.rewards) for one in second] == [(((3,),), (1.0,)), (((4,),), (0.5,))]


@pytest.mark.parametrize(("dataset", "preferred"), [("sums", (0.0, 5.0)), ("sentiment", (0.0, 1.0))])
def test_what_is_right_has_its_bonus_where_a_dataset_is_verified(
    dataset: str, preferred: tuple[float, ...], tmp_path: Path
) -> None:
    row = {"problem": 0, "wave": 0, "request": 0, "prompt_ids": [9], "completion_ids": [1]}
    Dataset.from_list([row | {"reward": reward} for reward in (0.0, 1.0)]).save_to_disk(tmp_path / "samples")
    answers = SampledAnswers(tmp_path / "samples", verified=load(dataset, max_examples=1).verified)
    (found,) = answers.answer([Cut(problem=0, count=2)])
    assert preferable(found, PreferenceSettings(reference="any")) == preferred
