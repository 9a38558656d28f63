"""An algorithm's plan of cuts, asked for as requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_grpo.evals.asking import SampleRequest
from async_grpo_experiments.algorithms.protocols import Continuations, Cut, Plan
from async_grpo_experiments.cut_plans import requests_of


def test_cuts_become_requests_and_groups_become_answers() -> None:
    seen: list[Any] = []

    def plan(problems: int) -> Plan:
        seen.append((yield [Cut(problem=problem, greedy=True, guided=True) for problem in range(problems)]))
        seen.append((yield [Cut(problem=1, prefix=(5, 6), count=2)]))

    def group(*completions: list[int]) -> Any:
        return SimpleNamespace(
            prompt_ids=np.array([1, 2]),
            completion_lengths=np.array([len(ids) for ids in completions]),
            completion_ids=np.array([token for ids in completions for token in ids]),
            rewards=np.array([[0.25, 0.5]] * len(completions), np.float32),
        )

    asked = requests_of(plan, unguided={"eta": 0.0})(2)
    greedy = {"temperature": 0.0}
    assert next(asked) == [SampleRequest(problem=0, sampling=greedy), SampleRequest(problem=1, sampling=greedy)]
    second = asked.send([None, group([5, 6, 7])])
    assert second == [SampleRequest(problem=1, samples=2, prefix_ids=(5, 6), sampling={"eta": 0.0})]
    with pytest.raises(StopIteration):
        asked.send([group([5, 6, 7, 8], [5, 6, 9])])
    first, last = seen
    cut = Cut(problem=1, greedy=True, guided=True)
    assert first == [Continuations(cut=cut, prompt=(1, 2), completions=((5, 6, 7),), rewards=(0.75,))]
    assert last[0].completions == ((7, 8), (9,)) and last[0].rewards == (0.75, 0.75)
