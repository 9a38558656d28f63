"""Engines in tests: jobs for them, and running them to the end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig

from async_grpo.engines import Engine, PreparedGroup, SampledGroup
from async_grpo.engines.transformers import TransformersEngine
from async_grpo.records import Job
from async_grpo.tokens import ids_and_logprobs
from kit.groups import make_job
from kit.waiting import DEADLINE_S


def job(seq: int = 0, *, row: Any = None, seed: int | None = None, size: int = 2, min_version: int = 0) -> Job:
    seed = seq if seed is None else seed
    return make_job(seq, size, run_id="r", row=row, seed=seed, min_version=min_version)


def logprobs_of(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """The log-probabilities of a completion that a forward pass computes, [tokens]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def group(prompts: Sequence[list[int]], seq: int = 0, seed: int | None = None, **sampling: float) -> PreparedGroup:
    asked = replace(job(seq, seed=seed, size=len(prompts)), sampling=sampling)
    return PreparedGroup(job=asked, version=0, prompt_ids=list(prompts))


def transformers_of(
    model: Any, tokens: int | None, pad: int, end: int | list[int], sampling: Mapping[str, Any], **options: Any
) -> TransformersEngine:
    """An engine that samples with this model. `options` are arguments of the engine."""
    given = {"do_sample": True, "temperature": 1.0, "top_k": 0, **sampling}
    config = GenerationConfig(max_new_tokens=tokens, pad_token_id=pad, eos_token_id=end, **given)
    options = {"loss_temperature": given["temperature"], "most_groups": 8, **options}
    return TransformersEngine(model, config=config, pad_token_id=pad, autocast=nullcontext, **options)


def run(engine: Engine, groups: Sequence[PreparedGroup]) -> list[SampledGroup]:
    """Step the engine until all groups have ended; in the order in which they do."""
    deadline = time.monotonic() + DEADLINE_S
    sampled = engine.sample(groups)
    while len(sampled) < len(groups):
        assert time.monotonic() < deadline, "the engine does not come to an end"
        sampled += engine.sample([])
    return sampled


def sample(engine: Engine, prompts: Sequence[list[int]], seed: int = 0) -> tuple[list[list[int]], list[list[float]]]:
    """One completion of each prompt: tokens and log-probabilities."""
    [sampled] = run(engine, [group(prompts, seed=seed)])
    if sampled.error is not None:
        raise sampled.error
    return ids_and_logprobs(sampled.tokens)
