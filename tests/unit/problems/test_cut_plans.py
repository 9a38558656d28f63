"""An algorithm's plan of cuts, asked for as requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import GenerationConfig

from async_grpo.errors import UnsupportedError
from async_grpo.evals.asking import SampleRequest
from async_grpo_experiments.algorithms.protocols import Continuations, Cut, Plan
from async_grpo_experiments.cut_plans import requests_of


def sampler(**changes: Any) -> Any:
    """A trainer with its sampling."""
    own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **changes}
    args = SimpleNamespace(**own, generation_kwargs=None, vllm_structured_outputs_regex=None)
    model = SimpleNamespace(generation_config=GenerationConfig())
    return SimpleNamespace(args=args, generation_config=GenerationConfig(do_sample=True, **own), model=model)


@pytest.mark.parametrize(
    ("changes", "named"), [({"top_p": 0.9}, "top_p=0.9"), ({"top_k": 20}, "top_k=20"), ({"min_p": 0.1}, "min_p=0.1")]
)
def test_values_are_of_the_untruncated_sampler(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{named} with a plan of values: values are of the untruncated sampler"):
        requests_of(lambda problems: iter(()), sampler(**changes))  # type: ignore[arg-type,return-value]


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

    asked = requests_of(plan, sampler(), unguided={"eta": 0.0})(2)
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
