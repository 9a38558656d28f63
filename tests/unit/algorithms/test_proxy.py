"""The proxy reward model: pairs of token ids, scores in any batch, and bounds that are fixed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.protocols import Cut
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
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer


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
