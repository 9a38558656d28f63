"""Star graphs, reviews, and the sampler that answers cuts with transformers' `generate`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from async_grpo_experiments.algorithms.protocols import Cut
from async_grpo_experiments.worlds import sentiment, star
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.tiny import small_transformer


def test_star_graphs_have_branches_from_one_start_and_edges_in_random_order() -> None:
    graphs = list(star.star_graphs(3, 4, 50))
    for graph in graphs:
        nodes = {node for edge in graph.edges for node in edge}
        assert len(nodes) == 1 + 3 * 3 and len(graph.edges) == 9
        assert len({path[0] for path in graph.paths}) == 1
        assert all(edge in graph.edges for path in graph.paths for edge in itertools.pairwise(path))
        assert graph.prompt.endswith(f"/ {graph.path[0]} {graph.path[-1]} =")
    assert len({graph.prompt for graph in graphs}) == 50 and {graph.right for graph in graphs} == {0, 1, 2}
    assert star.star_reward(["1 2", "1  2 ", "1 2 2"], ["1 2"] * 3) == [1, 1, 0]
    final_answer = star.star_reward.final_answer
    assert final_answer("1  2 ") == final_answer("1 2") != final_answer("1 2 2"), "what maj@k counts votes for"


def test_the_optimum_of_star_graphs() -> None:
    third = np.full(10, 1 / 3)
    found = [star.optimum(third, eta) for eta in (1, 0.5, 0.25, 0.1)]
    assert [success for success, _ in found] == pytest.approx([0.58, 0.79, 0.96, 1.0], abs=0.006)
    assert [divergence for _, divergence in found] == pytest.approx([0.12, 0.43, 0.92, 1.10], abs=0.006)


def test_the_chance_of_the_right_path_is_that_of_samples() -> None:
    tokenizer = star.star_tokenizer(5)
    model = small_transformer(tokenizer, width=32, layers=1)
    star.train_reference(model, tokenizer, 2, 2, steps=60, nodes=5, batch=64, lr=3e-3)
    graphs = list(star.star_graphs(2, 2, 4, nodes=5, seed=1))
    sampler = CutSampler(model, tokenizer, star.star_rows(graphs), star.star_reward, max_new_tokens=4, verified=True)
    torch.manual_seed(0)
    found = sampler.answer([Cut(problem=index, count=400) for index in range(4)])
    assert all(one.correct == tuple(reward == 1 for reward in one.rewards) for one in found)
    sampled = [np.mean(one.rewards) for one in found]
    assert star.chances(model, tokenizer, graphs) == pytest.approx(sampled, abs=0.1)
    assert np.mean(sampled) > 0.05, "it has learned what a walk is"


def test_cuts_are_answered_in_their_order_from_their_prefix_up_to_the_end() -> None:
    tokenizer = sentiment.sentiment_tokenizer()
    model = small_transformer(tokenizer, width=32, layers=1)
    sentiment.train_on_reviews(model, tokenizer, steps=40, batch=32, lr=5e-3)
    rows = sentiment.sentiment_rows(3)
    sampler = CutSampler(model, tokenizer, rows, sentiment.sentiment_reward, max_new_tokens=30)
    was = tuple(tokenizer("was good")["input_ids"])
    greedy = Cut(problem=0, greedy=True)
    found = sampler.answer([Cut(problem=2, prefix=was, count=2), greedy, Cut(problem=1, count=3), greedy])
    assert [(one.cut.problem, len(one.completions)) for one in found] == [(2, 2), (0, 1), (1, 3), (0, 1)]
    assert found[1] == found[3] and found[0].correct == ()
    assert found[0].prompt == tuple(tokenizer(rows[2]["prompt"])["input_ids"])
    assert all(len(tokens) <= 28 for tokens in found[0].completions)
    whole = tokenizer.decode([*was, *found[0].completions[0]], skip_special_tokens=True)
    assert found[0].rewards[0] == sentiment.sentiment_reward([whole])[0]
    ended = [tokens for one in found for tokens in one.completions if tokenizer.eos_token_id in tokens]
    assert ended and all(tokens.index(tokenizer.eos_token_id) == len(tokens) - 1 for tokens in ended)


def test_the_lexicon_judges_the_share_of_good_words() -> None:
    texts = ["the film was good", "dull and good", "the film", "bad bad good bad"]
    assert sentiment.sentiment_reward(texts) == [1, 0.5, 0.5, 0.25]
    assert np.mean(sentiment.sentiment_reward(sentiment.reviews(500))) == pytest.approx(0.5, abs=0.05)
