"""The proxy reward model: pairs of token ids, scores in any batch, and bounds that are fixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.protocols import Cut, PreferenceSettings
from async_grpo_experiments.algorithms.proxy import Proxy, padding_for, reward_of, train_proxy
from async_grpo_experiments.algorithms.rows import Rows, best_and_worst
from async_grpo_experiments.reward_models import prompt_ids, scores_of_texts
from async_grpo_experiments.worlds.enumerable import Enumerable
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSettings:
    tokenizer = words_tokenizer("abcdefgh")
    reference = save(tmp_path_factory.mktemp("reference"), endless_transformer(tokenizer, scale=0.05), tokenizer)
    return PreferenceSettings(
        reference=reference,
        num_workers=0,
        batch_size=128,
        micro_batch_size=128,
        gradient_checkpointing=False,
        lr=3e-3,
        max_steps=80,
        bradley_terry_sampling=False,
    )


def pairs(count: int, settings: PreferenceSettings) -> Rows:
    world = Enumerable.ascents(graded=True)
    found = world.answers([Cut(problem=problem, count=4) for problem in range(count)], seed=0)
    return best_and_worst(found, settings)


@pytest.fixture(scope="module")
def folder(settings: PreferenceSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("proxy")
    trained = train_proxy(settings, settings.reference, pairs(600, settings), out)
    assert trained.loss < 0.6
    return trained.folder


def test_a_proxy_orders_texts_as_their_reward_does(folder: Path, settings: PreferenceSettings) -> None:
    proxy = Proxy(folder)
    rows = pairs(150, replace(settings, seed=1)).groups()
    scaled = np.array([proxy.scaled([chosen.tokens, rejected.tokens]) for chosen, rejected in rows])
    assert (scaled[:, 0] > scaled[:, 1]).mean() > 0.85
    assert scaled.min() >= 0 and scaled.max() <= 1


def test_scores_do_not_depend_on_the_batch_and_the_last_token_counts(folder: Path) -> None:
    model = Proxy(folder)._model
    texts = [[0, 1, 2], [0, 8, 5, 9, 6, 7, 1, 9], [0, 1, 2, 9], [0, 3]]
    assert scores_of_texts(model, texts, batch_size=1) == pytest.approx(scores_of_texts(model, texts), abs=1e-5)
    assert abs(scores_of_texts(model, [texts[0]])[0] - scores_of_texts(model, [texts[2]])[0]) > 1e-4, (
        "9 is the end token"
    )
    assert padding_for(model, [[9, 1], [8, 9]]) == 8, "an end token inside of a text is not its end"
    with pytest.raises(UsageError, match="ends some text"):
        padding_for(model, [[token] for token in range(10)])


def test_scores_outside_of_the_bounds_are_clipped_and_counted(folder: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    narrow.mkdir()
    for file in folder.iterdir():
        (narrow / file.name).write_bytes(file.read_bytes())
    (narrow / "proxy.json").write_text('{"low": 1000.0, "high": 1001.0}')
    proxy = Proxy(narrow)
    assert proxy.scaled([[0, 1], [0, 2]]) == [0.0, 0.0] and proxy.clipped == 2


def test_it_is_a_reward_function_that_scores_the_tokens_that_were_sampled(
    folder: Path, settings: PreferenceSettings
) -> None:
    reward = reward_of(folder, settings.reference)
    assert reward(prompts=["a b"], completion_ids=[[3, 9]], completions=["d"]) == Proxy(folder).scaled([[0, 1, 3, 9]])
    tokenizer = words_tokenizer("abcdefgh")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %} h"
    assert prompt_ids(tokenizer, [{"role": "user", "content": "a b"}]) == [0, 1, 7]
