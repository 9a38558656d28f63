"""The rows of `matrix`: what we train at staleness 0 is what plain TRL trains on the same completions, or it shows.

Each is some seconds, so `make test-matrix` runs them, and `make test` does not.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest
from matrix import ROWS, get_trainer_of

from async_grpo.engines.captured import DecodeSteps
from async_grpo.errors import AsyncGRPOError, UnsupportedError
from async_grpo.rollout.engine_choice import transformers_engine
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.tokens import ids_and_logprobs
from async_grpo.training.trl_trainer import refuse_unsupported
from kit.compared_with_trl import largest_difference
from kit.engines import group, run
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replay_with_trl

pytestmark = pytest.mark.slow

SHOWS = 0.02  # nats: a mean difference of log-probabilities that no rounding of fp32 explains


@pytest.mark.parametrize("name", ROWS)
def test_it_trains_as_trl_does_or_it_shows(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    get_trainer = get_trainer_of(row, tmp_path)
    if row.fails:
        with pytest.raises((AttributeError, RuntimeError)):
            get_trainer().train()
        return
    if row.refused:
        with pytest.raises(UnsupportedError, match=row.refused):
            refuse_unsupported(get_trainer())
        return
    try:
        run = InProcessRun(get_trainer).train()
    except AsyncGRPOError:
        assert row.differs, "it is refused"
        return
    if row.differs:
        assert max(entry["async/logprob_mismatch"] for entry in run.logs) > SHOWS
        return
    assert run.logs[0]["grad_norm"] > 0
    plain = replay_with_trl(get_trainer, run.batches)
    largest_difference(run.logs, training_logs(plain), row.within)


GROWING = "falcon bloom mpt gpt_neo gptj codegen xglm gpt_oss lfm2 qwen3_next recurrent_gemma mamba mamba2 falcon_mamba"
"""Families that have no static shapes in transformers, no sdpa, or a state of fixed size."""


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if not (row.fails or row.refused)])
def test_fixed_shapes_give_the_same_tokens(name: str, tmp_path: Path) -> None:
    """As on CUDA, where each pass is a graph; what cannot have them is decoded as before."""
    engine = transformers_engine(RolloutTrainer(get_trainer_of(ROWS[name], tmp_path)()))
    prompts = [prompt for prompt in ([5, 6, 7, 8, 9], [10, 11], [12, 13, 14]) for _ in range(4)]
    growing, fixed = [], []
    for rows, steps in ((growing, None), (fixed, way := DecodeSteps(capture=False))):
        engine._steps = steps
        [sampled] = run(engine, [group(prompts, temperature=0.0)])
        rows += zip(*ids_and_logprobs(sampled.tokens), strict=True)
    if name.startswith(("family", "adapter")):
        is_growing = name.removeprefix("family ") in GROWING.split()
        assert is_growing == (way._said != {"tokens are decoded in fixed shapes"}), way._said
    rounds = ROWS[name].within > 1e-3  # in half precision the two likeliest tokens may change places
    for (wanted, logprobs), (ids, ours) in zip(growing, fixed, strict=True):
        assert ids == wanted or rounds
        alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, wanted, strict=False)))
        assert ours[:alike] == pytest.approx(logprobs[:alike], abs=0.1 if rounds else 1e-4)
