"""Which groups teach nothing: those whose advantages TRL would make 0."""

from __future__ import annotations

import numpy as np
import pytest

from async_grpo.archive.advantages import AdvantageRule

NAN = float("nan")


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize(
    ("rewards", "weights", "nothing"),
    [
        ([[1.0, 0.5], [1.0, 0.5]], None, True),
        ([[1.0, 0.5], [0.0, 0.5]], None, False),
        ([[0.3], [0.3], [0.3]], None, True),
        ([[1.0, 0.5], [0.0, 0.5]], (0.0, 1.0), True),  # the first does not count
        ([[1.0, NAN], [1.0, NAN]], None, True),
        ([[NAN, NAN], [1.0, 0.0]], None, True),  # one completion has a reward: nothing to compare it with
        ([[1.0], [NAN], [0.0]], None, False),
    ],
)
def test_groups_that_teach_nothing(
    aggregation: str, rewards: list[list[float]], weights: tuple[float, ...] | None, nothing: bool
) -> None:
    rule = AdvantageRule(multi_objective_aggregation=aggregation, reward_weights=weights)
    group = np.array(rewards, np.float32)
    assert rule.teaches_nothing(group) == nothing
    assert (np.abs(rule.advantages([group])[0]).max() < 1e-3) == nothing, "the advantages say the same"


def test_functions_that_disagree_teach_something_where_each_is_normalised() -> None:
    group = np.array([[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]], np.float32)  # all sums are 1
    assert AdvantageRule().teaches_nothing(group)
    each = AdvantageRule(multi_objective_aggregation="normalize_then_sum", reward_weights=(1.0, 1.0))
    assert not each.teaches_nothing(group)
    weighted = AdvantageRule(multi_objective_aggregation="normalize_then_sum", reward_weights=(3.0, 1.0))
    assert np.abs(weighted.advantages([group])[0]).min() > 0.1, "TRL's advantages of such a group"


@pytest.mark.parametrize("wrong", [np.inf, -np.inf])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_an_infinite_reward_takes_the_advantages_of_its_group_or_function(wrong: float) -> None:
    group = np.array([[wrong, 1.0], [2.0, 3.0], [0.0, 1.0]], np.float32)
    each = AdvantageRule(multi_objective_aggregation="normalize_then_sum")
    assert AdvantageRule().teaches_nothing(group)
    assert not AdvantageRule().advantages([group])[0].any()
    assert not each.teaches_nothing(group), "the second function compares them"
    assert each.advantages([group])[0].all()
