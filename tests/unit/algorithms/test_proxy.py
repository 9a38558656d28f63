"""Algorithms of pairs and of rounds: what a proxy learns, DPO's loss and its rounds, GRPO and GRPO-HF."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo.rundir.files import write_json
from async_grpo.rundir.shape import as_json
from async_grpo_experiments.algorithms.dpo import DPO, DPOSettings
from async_grpo_experiments.algorithms.grpo import GRPO, GRPOHF, GRPOHFSettings, GRPORound, GRPOSettings, trainer_of
from async_grpo_experiments.algorithms.protocols import Cut, collect
from async_grpo_experiments.algorithms.proxy import (
    RECORD,
    Proxy,
    ProxySettings,
    ProxyTraining,
    padding_for,
    proxy_of_round,
    reward_of,
    split_by_prompt,
    train_proxy,
)
from async_grpo_experiments.algorithms.rows import NO_ROWS, Rows, best_and_worst
from async_grpo_experiments.reward_models import prompt_ids, scores_of_texts
from async_grpo_experiments.worlds.enumerable import Enumerable, all_sequences
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.sentiment import sentiment_reward, sentiment_rows, sentiment_tokenizer
from async_grpo_experiments.worlds.tiny import endless_transformer, save, small_transformer, words_tokenizer


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ProxySettings:
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(tmp_path_factory.mktemp("reference"), endless_transformer(tokenizer, scale=0.05), tokenizer)
    small = {"num_workers": 0, "batch_size": 128, "micro_batch_size": 128, "gradient_checkpointing": False}
    proxy = ProxyTraining(epochs=4, lr=3e-3)
    return ProxySettings(reference=reference, max_steps=1, proxy=proxy, bradley_terry_sampling=False, **small)


def pairs(count: int, settings: ProxySettings) -> Rows:
    """Pairs of prompts that differ, and do not matter. The reward is the mean of the tokens, from 0 to 1."""
    world = replace(Enumerable.ascents(), rewards=all_sequences().mean(1) / 7)
    found = world.answers([Cut(problem=problem, count=4) for problem in range(count)], seed=settings.seed)
    prompts = [tuple(one.cut.problem // 8**index % 8 for index in range(2)) for one in found]
    return best_and_worst([replace(one, prompt=prompt) for one, prompt in zip(found, prompts)], settings)


@pytest.fixture(scope="module")
def folder(settings: ProxySettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("proxy")
    trained = train_proxy(settings, pairs(500, settings), out)
    assert trained.loss < 0.6 and trained.steps > 1, "max_steps is of what follows the proxy"
    return trained.folder


def test_a_proxy_orders_texts_as_their_reward_does(folder: Path, settings: ProxySettings) -> None:
    proxy = Proxy(folder)
    rows = pairs(150, replace(settings, seed=1)).groups()
    scaled = np.array([proxy.scaled([chosen.tokens, rejected.tokens]) for chosen, rejected in rows])
    assert (scaled[:, 0] > scaled[:, 1]).mean() > 0.9
    assert scaled.min() >= 0 and scaled.max() <= 1


def test_a_proxy_says_how_it_orders_pairs_of_prompts_that_it_was_not_trained_on(
    folder: Path, settings: ProxySettings
) -> None:
    trained_on, held_out = split_by_prompt(pairs(500, settings), settings.seed)
    prompts = [{group[0].prompt for group in groups} for groups in (trained_on, held_out)]
    assert not prompts[0] & prompts[1] and len(prompts[1]) == sum(map(len, prompts)) // 10
    proxy = Proxy(folder)
    scaled = np.array([proxy.scaled([chosen.tokens, rejected.tokens]) for chosen, rejected in held_out])
    assert proxy.record.held_out_pairs == len(held_out) > 30
    assert proxy.record.held_out_right == pytest.approx((scaled[:, 0] > scaled[:, 1]).mean())
    assert proxy.record.held_out_right > 0.9


def test_a_proxy_that_orders_by_chance_is_warned_of(
    settings: ProxySettings, tmp_path: Path, warnings: list[str]
) -> None:
    train_proxy(replace(settings, proxy=ProxyTraining(epochs=0.1, lr=1e-6)), pairs(100, settings), tmp_path)
    assert any("That may be chance (95% " in line for line in warnings)


def test_the_same_seed_gives_the_same_proxy_which_later_rounds_copy(settings: ProxySettings, tmp_path: Path) -> None:
    short = replace(settings, proxy=ProxyTraining(epochs=0.2))
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        folder = proxy_of_round(short, pairs(100, settings), None, tmp_path / str(seed))
        found.append((folder / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    later = proxy_of_round(short, NO_ROWS, tmp_path / "0" / "head", tmp_path / "later")
    assert (later / "model.safetensors").read_bytes() == found[0]


def test_scores_do_not_depend_on_the_batch_and_the_last_token_counts(folder: Path) -> None:
    model = Proxy(folder)._model
    texts = [[0, 1, 2], [0, 8, 5, 9, 6, 7, 1, 9], [0, 1, 2, 9], [0, 3]]
    assert scores_of_texts(model, texts, batch_size=1) == pytest.approx(scores_of_texts(model, texts), abs=1e-5)
    without_end, with_end = (scores_of_texts(model, [texts[index]])[0] for index in (0, 2))
    assert abs(without_end - with_end) > 1e-4, "9 is the end token"
    assert padding_for(model, [[9, 1], [8, 9]]) == 8, "an end token inside of a text is not its end"
    with pytest.raises(UsageError, match="ends some text"):
        padding_for(model, [[token] for token in range(10)])


def test_scores_outside_of_the_bounds_are_clipped_and_counted(folder: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    shutil.copytree(folder, narrow)
    (narrow / "proxy.json").write_text('{"low": 1000.0, "high": 1001.0}')  # as it was before pairs were held out
    proxy = Proxy(narrow)
    assert proxy.scaled([[0, 1], [0, 2]]) == [0.0, 0.0] and proxy.clipped == 2


def test_it_is_a_reward_function_that_scores_the_tokens_that_were_sampled(
    folder: Path, settings: ProxySettings, tmp_path: Path
) -> None:
    reward = reward_of(folder, settings.reference)
    assert reward(prompts=["a b"], completion_ids=[[3, 9]], completions=["d"]) == Proxy(folder).scaled([[0, 1, 3, 9]])
    judge = tmp_path / "judge"
    shutil.copytree(folder, judge, ignore=shutil.ignore_patterns(RECORD))
    (raw,) = reward_of(judge, settings.reference)(prompts=["a b"], completion_ids=[[3, 9]], completions=["d"])
    assert raw == pytest.approx(scores_of_texts(Proxy(folder)._model, [[0, 1, 3, 9]])[0]), "the score as it is"
    tokenizer = words_tokenizer("abcdefgh")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} h"
    assert prompt_ids(tokenizer, [{"role": "user", "content": "a b"}]) == [0, 1, 7]


# --- DPO on rows of token ids, by TRL's trainer ------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_dpo(tmp_path_factory: pytest.TempPathFactory) -> DPOSettings:
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(tmp_path_factory.mktemp("reference"), endless_transformer(tokenizer), tokenizer)
    small = {"num_workers": 0, "batch_size": 8, "micro_batch_size": 8, "gradient_checkpointing": False}
    return DPOSettings(reference=reference, **small)


def rows_of(dpo: DPO) -> Rows:
    world = Enumerable.ascents()
    return dpo.rows(collect(dpo.plan(12), lambda cuts: world.answers(cuts, seed=len(cuts))))


def ten_lines(policy: torch.nn.Module, reference: torch.nn.Module, rows: Rows, beta: float) -> torch.Tensor:
    def logprob(model: torch.nn.Module, row: object) -> torch.Tensor:
        ids = torch.tensor([row.tokens])
        logps = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logps[row.unlabelled - 1 :].sum()

    margins = []
    for chosen, rejected in rows.groups():
        ratios = [logprob(policy, row) - logprob(reference, row).detach() for row in (chosen, rejected)]
        margins.append(ratios[0] - ratios[1])
    return torch.nn.functional.softplus(-beta * torch.stack(margins)).mean()


@pytest.mark.parametrize("loss_type", [["sigmoid"], ["sigmoid", "sft"]])
def test_loss_and_gradient_are_those_of_the_formula(of_dpo: DPOSettings, loss_type: list[str], tmp_path: Path) -> None:
    dpo = DPO(replace(of_dpo, loss_type=loss_type))
    rows = Rows(rows_of(dpo).items[:8])
    trainer = dpo.trainer(rows, None, tmp_path)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += 0.02 * torch.randn_like(weight)
    batch = trainer.data_collator([trainer.train_dataset[index] for index in range(4)])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    found = [weight.grad.clone() for weight in trainer.model.parameters()]
    trainer.model.zero_grad()
    expected = ten_lines(trainer.model, trainer.ref_model, rows, of_dpo.beta)
    if "sft" in loss_type:
        chosen = [row for row in rows.items if row.label == 1]
        tokens = torch.cat([torch.tensor(row.continuation) for row in chosen])
        logits = [trainer.model(torch.tensor([row.tokens])).logits[0, row.unlabelled - 1 : -1] for row in chosen]
        expected = expected + torch.nn.functional.cross_entropy(torch.cat(logits), tokens)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for gradient, weight in zip(found, trainer.model.parameters(), strict=True):
        assert torch.allclose(gradient, weight.grad, atol=1e-5)


def test_it_trains_from_the_round_before_against_the_original_reference(of_dpo: DPOSettings, tmp_path: Path) -> None:
    dpo = DPO(replace(of_dpo, max_steps=30, lr=3e-3))
    rows = rows_of(dpo)
    first = dpo.train(rows, out=tmp_path / "1")
    assert first.folder == tmp_path / "1/model" and first.steps == 30 and first.loss < 0.69
    second = dpo.trainer(rows, first.folder, tmp_path / "2")
    weights = [dict(model.named_parameters()) for model in (second.model, second.ref_model)]
    name = "model.layers.0.mlp.fc1.weight"
    original = dpo.trainer(rows, None, tmp_path / "3").model.get_parameter(name)
    assert torch.equal(weights[1][name], original) and not torch.equal(weights[0][name], original)
    with pytest.raises(UsageError, match="holds what another training left"):
        dpo.train(rows, out=tmp_path / "1")


def test_its_temperature_is_1(of_dpo: DPOSettings) -> None:
    with pytest.raises(UsageError, match="loss is at temperature 1, and temperature is 0"):
        replace(of_dpo, temperature=0.7)


def test_a_row_longer_than_the_model_is_refused_and_never_cut(of_dpo: DPOSettings, tmp_path: Path) -> None:
    rows = rows_of(DPO(of_dpo))
    long = replace(rows.items[1], continuation=(1,) * 256)
    with pytest.raises(UsageError, match=r"row 1 \(problem \d+\) has \d+ tokens, and the model has 256 positions"):
        DPO(of_dpo).train(Rows((rows.items[0], long)), out=tmp_path)


# --- GRPO and GRPO-HF: -------------------------------------------------------------------------------------------

REWARD = "async_grpo_experiments.worlds.sentiment:sentiment_reward"


@pytest.fixture
def of_grpo(tmp_path: Path) -> GRPOHFSettings:
    tokenizer = sentiment_tokenizer()
    reference = save(tmp_path / "reference", small_transformer(tokenizer, width=32, layers=1), tokenizer)
    small = {"num_workers": 0, "batch_size": 16, "micro_batch_size": 16, "gradient_checkpointing": False}
    return GRPOHFSettings(reference=reference, max_steps=3, lr=1e-3, max_new_tokens=8, workers=1, **small)


def test_a_later_round_trains_its_model_and_keeps_to_the_original_reference(
    of_grpo: GRPOHFSettings, tmp_path: Path
) -> None:
    tokenizer = sentiment_tokenizer()
    later = save(tmp_path / "later", small_transformer(tokenizer, width=32, layers=1, seed=1), tokenizer)
    own = GRPOSettings(reference=of_grpo.reference, max_new_tokens=8, kl_coef=0.1)
    given = {"problems": sentiment_rows(8), "reward": REWARD, "output": str(tmp_path / "out")}
    write_json(tmp_path / "round.json", as_json(GRPORound(settings=own, model=later, **given)))
    trainer = trainer_of(tmp_path / "round.json")
    name = "model.layers.0.mlp.up_proj.weight"
    policy, reference = (model.get_parameter(name) for model in (trainer.model, trainer.ref_model))
    assert torch.equal(policy, small_transformer(tokenizer, width=32, layers=1, seed=1).get_parameter(name))
    assert torch.equal(reference, small_transformer(tokenizer, width=32, layers=1).get_parameter(name))
    assert (trainer.args.beta, trainer.args.num_generations, trainer.args.max_completion_length) == (0.1, 4, 8)
    assert trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps == 24


def test_grpo_asks_for_nothing_beforehand_and_spares_what_another_training_left(
    of_grpo: GRPOHFSettings, tmp_path: Path
) -> None:
    grpo = GRPO(of_grpo, sentiment_rows(8), REWARD)
    assert collect(grpo.plan(8), lambda cuts: pytest.fail("nothing is asked")) == [] and grpo.rows([]) == NO_ROWS
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError):
        grpo.train(out=tmp_path)


@pytest.mark.slow
def test_two_rounds_of_grpo_hf_with_one_proxy(of_grpo: GRPOHFSettings, tmp_path: Path) -> None:
    problems = sentiment_rows(16)
    tokenizer = sentiment_tokenizer()
    model = small_transformer(tokenizer, width=32, layers=1)
    sampler = CutSampler(model, tokenizer, problems, sentiment_reward, max_new_tokens=8)
    algorithm = GRPOHF(replace(of_grpo, bradley_terry_sampling=False), problems)
    torch.manual_seed(0)
    rows = algorithm.rows(collect(algorithm.plan(16), sampler.answer))
    first = algorithm.train(rows, out=tmp_path / "1")
    second = algorithm.train(rows, first.folder, out=tmp_path / "2")
    assert (first.steps, second.steps) == (3, 3)
    proxies = [(tmp_path / name / "proxy" / "proxy.json").read_text() for name in ("1", "2")]
    assert proxies[0] == proxies[1]
    assert algorithm.rows(collect(algorithm.plan(16, 2), sampler.answer)) == NO_ROWS
