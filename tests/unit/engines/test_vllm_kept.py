"""The tokens that vLLM kept, from its output to the record of a group; and what it asks of settings for that."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from async_grpo.engines import Chunk, SampledGroup
from async_grpo.engines.continuous import ContinuousEngine
from async_grpo.engines.vllm_sampling import kept_of, set_own
from async_grpo.errors import BadGroupError, GeneratorError
from async_grpo.records import Timings
from async_grpo.rollout.trl_group import GeneratedGroup, Scores, to_record
from async_grpo.tokens import Tokens
from async_grpo.tokens.kept_tokens import unpack
from kit.engines import group


def kept(*sets: list[int]) -> list[bytes]:
    return [np.array(each, np.int32).tobytes() for each in sets]


class TwoSteps:
    """An engine that writes two tokens for each request, one a step, and names what it kept."""

    max_num_seqs, versions_at_once = 8, 1

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.steps = 0

    @property
    def busy(self) -> bool:
        return self.steps < 2

    def submit(self, request_id: str, prompt_ids: list[int], **_: Any) -> None:
        self.requests.append(request_id)

    def step(self) -> list[Chunk]:
        self.steps += 1
        return [
            Chunk(name, Tokens([self.steps], [-0.5], kept=kept([self.steps, int(name) + 10])), self.steps == 2)
            for name in self.requests
        ]


def sampled(purpose: Any = "train") -> SampledGroup:
    asked = group([[1], [2]])
    engine = ContinuousEngine(TwoSteps(), group_size=2)  # type: ignore[arg-type]
    assert engine.sample([replace(asked, job=replace(asked.job, purpose=purpose))]) == []
    [ended] = engine.sample([])
    return ended


def test_the_sets_of_a_group_are_collected_with_its_tokens() -> None:
    assert [tokens.kept for tokens in sampled().tokens] == [kept([1, 10], [2, 10]), kept([1, 11], [2, 11])]


@pytest.mark.parametrize("purpose", ["eval", "generate"])
def test_what_nobody_trains_on_needs_no_sets(purpose: str) -> None:
    assert not any(tokens.names_kept for tokens in sampled(purpose).tokens)


def generated(sets: list[list[bytes]] | None) -> GeneratedGroup:
    asked = group([[1], [1]])
    first, second = sets or [[b"", b""], [b""]]
    return GeneratedGroup(
        job=replace(asked.job, row={"prompt": "p"}),
        begun_by=0,
        rows=[{"prompt": "p"}] * 2,
        prompts=["p"] * 2,
        completions=["c"] * 2,
        prompt_ids=[[1], [1]],
        tokens=[Tokens([1, 2], [-0.5, -0.5], kept=first), Tokens([3], [-0.5], kept=second)],
        has_masks=False,
        environments=None,
        metrics={},
    )


def record_of(sets: list[list[bytes]] | None) -> Any:
    scores = Scores(names=("r",), rewards=torch.zeros(2, 1), metrics={}, extra_columns={})
    return to_record(generated(sets), scores, attempt=0, worker="dev1", timings=Timings())


def test_the_record_of_a_group_has_them() -> None:
    record = record_of([kept([1, 7], []), kept([3])])
    found = unpack(record.kept_tokens, record.completion_ids)
    assert (found.sizes.tolist(), found.ids.tolist()) == ([2, 0, 1], [1, 7, 3])
    assert record_of(None).kept_tokens is None
    with pytest.raises(BadGroupError, match="not among the tokens that the sampler says it kept"):
        record_of([kept([7], []), kept([3])])


def completion(sets: list[list[int]] | None) -> SimpleNamespace:
    mask = None if sets is None else SimpleNamespace(token_ids=sets)
    return SimpleNamespace(token_ids=[5, 6], sampling_mask=mask)


def test_sets_are_read_from_vllms_output() -> None:
    assert kept_of(completion([[1, 5], [6]])) == kept([1, 5], [6])
    for missing in (None, [[5]]):
        with pytest.raises(GeneratorError, match=r"kept tokens of \d places for 2 tokens"):
            kept_of(completion(missing))


def settings(**changes: float) -> Any:
    return SimpleNamespace(**{"temperature": 1.0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, **changes})


def test_a_greedy_evaluation_by_an_engine_that_names_what_it_kept() -> None:
    """vLLM takes no temperature of 0 there; one token to choose from is the same."""
    sampling = settings()
    set_own(sampling, {"temperature": 0, "top_p": 0.5, "top_k": 0}, returns_kept=True)
    assert sampling == settings(temperature=1.0, top_p=1.0, top_k=1, min_p=0.0)
    sampling = settings()
    set_own(sampling, {"temperature": 0}, returns_kept=False)
    assert sampling == settings(temperature=0, top_p=1.0, top_k=0, min_p=0.0)


def test_an_evaluation_without_top_k_cannot_be_had_of_such_an_engine() -> None:
    with pytest.raises(ValueError, match="--eval-top-k"):
        set_own(settings(), {"temperature": 0.6, "top_k": 0}, returns_kept=True)
    set_own(settings(), {"temperature": 0.6, "top_k": 0}, returns_kept=False)
    set_own(settings(top_k=0), {}, returns_kept=False)
