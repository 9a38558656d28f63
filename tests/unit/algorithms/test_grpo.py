"""GRPO and GRPO-HF: the trainer that a round's processes build, and a run of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.shape import as_json
from async_grpo_experiments.algorithms.grpo import GRPO, GRPOHF, GRPOHFSettings, GRPORound, GRPOSettings, trainer_of
from async_grpo_experiments.algorithms.protocols import collect
from async_grpo_experiments.algorithms.rows import NO_ROWS
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.sentiment import sentiment_reward, sentiment_rows, sentiment_tokenizer
from async_grpo_experiments.worlds.tiny import save, small_transformer

REWARD = "async_grpo_experiments.worlds.sentiment:sentiment_reward"


@pytest.fixture
def settings(tmp_path: Path) -> GRPOHFSettings:
    tokenizer = sentiment_tokenizer()
    reference = save(tmp_path / "reference", small_transformer(tokenizer, width=32, layers=1), tokenizer)
    small = {"num_workers": 0, "batch_size": 16, "micro_batch_size": 16, "gradient_checkpointing": False}
    return GRPOHFSettings(reference=reference, max_steps=3, lr=1e-3, max_new_tokens=8, workers=1, **small)


def test_a_later_round_trains_its_model_and_keeps_to_the_original_reference(
    settings: GRPOHFSettings, tmp_path: Path
) -> None:
    tokenizer = sentiment_tokenizer()
    later = save(tmp_path / "later", small_transformer(tokenizer, width=32, layers=1, seed=1), tokenizer)
    own = GRPOSettings(reference=settings.reference, max_new_tokens=8, kl_coef=0.1)
    given = {"problems": sentiment_rows(8), "reward": REWARD, "output": str(tmp_path / "out")}
    round_ = GRPORound(settings=own, model=later, **given)
    write_json(tmp_path / "round.json", as_json(round_))
    trainer = trainer_of(tmp_path / "round.json")
    name = "model.layers.0.mlp.up_proj.weight"
    policy, reference = (model.get_parameter(name) for model in (trainer.model, trainer.ref_model))
    assert torch.equal(policy, small_transformer(tokenizer, width=32, layers=1, seed=1).get_parameter(name))
    assert torch.equal(reference, small_transformer(tokenizer, width=32, layers=1).get_parameter(name))
    assert (trainer.args.beta, trainer.args.num_generations, trainer.args.max_completion_length) == (0.1, 4, 8)
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 24


def test_grpo_asks_for_nothing_beforehand_and_spares_what_another_training_left(
    settings: GRPOHFSettings, tmp_path: Path
) -> None:
    grpo = GRPO(settings, sentiment_rows(8), REWARD)
    assert collect(grpo.plan(8), lambda cuts: pytest.fail("nothing is asked")) == [] and grpo.rows([]) == NO_ROWS
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match="holds what another training left"):
        grpo.train(out=tmp_path)


@pytest.mark.slow
def test_two_rounds_of_grpo_hf_with_one_proxy(settings: GRPOHFSettings, tmp_path: Path) -> None:
    problems = sentiment_rows(16)
    tokenizer = sentiment_tokenizer()
    model = small_transformer(tokenizer, width=32, layers=1)
    sampler = CutSampler(model, tokenizer, problems, sentiment_reward, max_new_tokens=8)
    algorithm = GRPOHF(replace(settings, bradley_terry_sampling=False), problems)
    torch.manual_seed(0)
    rows = algorithm.rows(collect(algorithm.plan(16), sampler.answer))
    first = algorithm.train(rows, out=tmp_path / "1")
    second = algorithm.train(rows, first.folder, out=tmp_path / "2")
    assert (first.steps, second.steps) == (3, 3)
    proxies = [(tmp_path / name / "proxy" / "proxy.json").read_text() for name in ("1", "2")]
    assert proxies[0] == proxies[1]
    assert algorithm.rows(collect(algorithm.plan(16, 2), sampler.answer)) == NO_ROWS
