"""A replay by another correction than the run's, of groups that vLLM has sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.errors import UnsupportedError
from async_grpo.roles import replay
from async_grpo.training.corrections.rule import rule


def check(to: str, run: str, *, generator: str | None = "vllm", resolved: str | None = None, top_k: int = 20) -> None:
    args = {"temperature": 1.0, "top_p": 1.0, "top_k": top_k, "min_p": None, "repetition_penalty": 1.0}
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(**args, generation_kwargs=None, vllm_structured_outputs_regex=None)
    )
    state: Any = SimpleNamespace(generator=generator, correction=run, resolved={"generator": resolved})
    replay._check_groups_suit(rule(to, None, None, None), trainer, state)


@pytest.mark.parametrize("run", ["none", "trl"])
@pytest.mark.parametrize("known", [{"generator": "vllm"}, {"generator": None, "resolved": "vllm"}])
def test_groups_without_kept_tokens_are_not_replayed_by_a_correction_that_needs_them(
    run: str, known: dict[str, str | None]
) -> None:
    with pytest.raises(UnsupportedError, match=rf"--correction {run} with top_k=20.*decoupled would be biased"):
        check("decoupled", run, **known)


def test_what_has_the_log_probabilities_that_are_needed_is_replayed(warnings: list[str]) -> None:
    check("decoupled", "bypass")  # its groups name the tokens
    check("decoupled", "none", top_k=0)
    check("decoupled", "none", generator="hf")
    check("decoupled", "none", generator=None, resolved="hf")
    check("none", "trl")
    check("decoupled", "none", generator=None, top_k=0)  # whatever sampled them
    assert not warnings


def test_a_run_that_does_not_say_what_sampled_it_is_replayed_with_a_warning(warnings: list[str]) -> None:
    check("decoupled", "none", generator=None)
    assert "run.json does not say what sampled the groups" in warnings[0]
    assert "(top_k=20), and --correction decoupled is biased" in warnings[0]
