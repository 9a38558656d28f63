"""Where every value is known, the workers' engine decodes the optimum, and says how far that is from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from transformers import LogitsProcessorList

from async_grpo.engines.transformers import TransformersEngine
from async_grpo.evals.estimators import mean_with_interval
from async_grpo_experiments.guidance import Guidance, HeadRecord, ValueHead
from async_grpo_experiments.guidance.head import HeadOutput
from async_grpo_experiments.guidance.setup import TrainerGuidance
from async_grpo_experiments.worlds.enumerable import (
    LENGTH,
    TOKENS,
    Enumerable,
    Steps,
    all_sequences,
    ascents_reward,
    numbers_of,
)
from async_grpo_experiments.worlds.tiny import endless_transformer, words_tokenizer
from kit.engines import group, run, transformers_of

PROMPT = (3, 1)
ETA = 0.2


class ExactHead(ValueHead):
    """Looks up the exact distribution of the return behind each prefix."""

    table: Steps  # log-probabilities [S, V, K] for each step

    def forward(self, input_ids_BT: Any, *_: Any, **__: Any) -> HeadOutput:
        tokens_BT = input_ids_BT[:, len(PROMPT) :].numpy()
        step_SVK = self.table[tokens_BT.shape[1] - 1]
        found_BK = step_SVK.reshape(-1, step_SVK.shape[-1])[numbers_of(tokens_BT)]
        return HeadOutput(torch.tensor(found_BK, dtype=torch.float32)[:, None], None)


class Kept(TrainerGuidance):
    """Keeps the scores that the engine samples from."""

    scores: Any = None

    def processors(self, *args: Any, **more: Any) -> LogitsProcessorList:
        return LogitsProcessorList([*super().processors(*args, **more), self._keep])

    def _keep(self, _: Any, scores: Any) -> Any:
        self.scores = scores
        return scores


@dataclass
class Decoded:
    """A world whose reference is a transformer, and the engine that decodes by the exact head of it."""

    world: Enumerable
    guidance: Kept
    engine: TransformersEngine

    def policy(self) -> Steps:
        """What the engine samples the next token from, behind every prefix."""
        steps = []
        for t in range(LENGTH):
            prefixes = all_sequences(t).tolist()
            [sampled] = run(self.engine, [group([[*PROMPT, *prefix] for prefix in prefixes], max_tokens=1)])
            assert sampled.error is None
            steps.append(log_softmax(self.guidance.scores[:, :TOKENS].double().numpy(), -1))
        return steps


@pytest.fixture(scope="module", params=[False, True], ids=["binary", "graded"])
def decoded(request: pytest.FixtureRequest) -> Decoded:
    tokenizer = words_tokenizer("abcdefgh")
    model = endless_transformer(tokenizer).eval()
    world = Enumerable.of_model(model, PROMPT, ascents_reward(all_sequences(), graded=request.param))
    record = HeadRecord.of(model, tokenizer, kind="value", loss="mle", temperature=1.0)
    head = ExactHead.beginning_from(model, record, tokenizer)
    head.table = [np.log(np.maximum(step, 1e-30)) for step in world.chances(record.levels.tolist())]
    guidance = Kept(Guidance(head=head, eta=ETA, top_k=TOKENS, use_cache=False))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    engine = transformers_of(model, LENGTH, pad, end, {}, guidance=guidance, tokenizer=tokenizer)
    return Decoded(world, guidance, engine)


def test_the_engine_decodes_the_optimum(decoded: Decoded) -> None:
    policy = decoded.policy()
    assert decoded.world.gap(policy, ETA) < 1e-6
    assert decoded.world.divergence(policy) > 0.1, "the optimum is not the reference"
    best = decoded.world.objective(decoded.world.best(ETA), ETA)
    assert decoded.world.objective(policy, ETA) == pytest.approx(best, abs=1e-6)


def test_the_interval_of_avg_kl_holds_the_enumerated_one(decoded: Decoded) -> None:
    wanted = decoded.world.divergence(decoded.world.best(ETA))
    held = 0
    for seed in range(20):
        [sampled] = run(decoded.engine, [group([list(PROMPT)] * 200, seed=seed)])
        assert sampled.error is None
        found = mean_with_interval(sampled.divergences)
        held += found.low <= wanted <= found.high
    assert held >= 17
