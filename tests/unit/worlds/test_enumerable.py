"""The enumerable worlds: their exact values, and what other formulas than Q#'s lack of the optimum."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from async_grpo_experiments.algorithms.protocols import Cut
from async_grpo_experiments.worlds import sentiment, star
from async_grpo_experiments.worlds.enumerable import (
    LENGTH,
    Enumerable,
    Steps,
    all_sequences,
    ascents_reward,
    log_of_sequences,
    numbers_of,
    sample,
    steps_of,
    values_of,
)
from async_grpo_experiments.worlds.sampler import CutSampler
from async_grpo_experiments.worlds.tiny import endless_transformer, small_transformer, words_tokenizer

LEVELS = np.arange(11) / 10


def histogram(world: Enumerable, eta: float) -> Steps:
    with np.errstate(divide="ignore"):
        return [logsumexp(np.log(chances) + LEVELS / eta, axis=-1) for chances in world.chances(LEVELS)]


def contrastive(world: Enumerable, eta: float) -> Steps:
    return [mean / eta for mean in world.means()]


def expectation(world: Enumerable, eta: float) -> Steps:
    return [np.log(np.maximum(mean, 1e-9)) for mean in world.means()]


def bernoulli(world: Enumerable, eta: float) -> Steps:
    return [np.log(1 - mean + mean * np.exp(1 / eta)) for mean in world.means()]


def log_odds(world: Enumerable, eta: float, *, both: bool) -> Steps:
    return [np.log(chance / (1 - chance)) / eta for chance in world.preferred(1.0, both=both)]


@pytest.mark.parametrize(
    ("offsets", "binary", "graded"),
    [(contrastive, 0.261, 0.072), (expectation, 0.055, 0.207), (bernoulli, 0.0, 0.194), (histogram, 0.0, 0.0)],
)
@pytest.mark.parametrize("is_graded", [False, True])
def test_gaps_of_each_formula_with_exact_values(offsets, binary: float, graded: float, is_graded: bool) -> None:
    world = Enumerable.tables(graded=is_graded)
    policy = world.guided(offsets(world, 0.2))
    gap = world.gap(policy, 0.2)
    assert gap == pytest.approx(graded if is_graded else binary, rel=0.01, abs=1e-12)
    lacking = world.objective(world.best(0.2), 0.2) - world.objective(policy, 0.2)
    assert lacking == pytest.approx(0.2 * gap, abs=1e-9)


def test_contrastive_on_ascents_is_what_a_learned_head_is_held_against() -> None:
    world = Enumerable.ascents()
    assert world.gap(world.guided(contrastive(world, 0.3)), 0.3) == pytest.approx(0.250, rel=0.01)


@pytest.mark.parametrize(
    ("world", "most", "none"), [(Enumerable.tables, 0.006, 0.055), (Enumerable.ascents, 0.014, 0.17)]
)
def test_a_token_without_a_score_is_best_counted_as_the_worst_scored_one(world: Any, most: float, none: float) -> None:
    """Against no centring, the scored tokens' own mass, and the value of the prefix: what each rule lacks."""
    lacks: dict[str, list[float]] = {}
    for is_graded, top_k, eta in itertools.product((False, True), (4, 6), (0.1, 0.2)):
        one = world(graded=is_graded)
        objectives = {rule: one.objective(one.guided(steps), eta) for rule, steps in by_rule(one, eta, top_k).items()}
        for rule, found in objectives.items():
            lacks.setdefault(rule, []).append(max(objectives.values()) - found)
    assert max(lacks["smallest"]) == pytest.approx(most, abs=0.001)
    assert max(lacks["none"]) == pytest.approx(none, abs=0.003)
    assert max(lacks["smallest"]) == min(max(found) for found in lacks.values())


def by_rule(world: Enumerable, eta: float, top_k: int) -> dict[str, Steps]:
    """The best offsets of the likeliest tokens, less what each rule subtracts; 0 for the others."""
    found: dict[str, Steps] = {"none": [], "smallest": [], "mass": [], "value": []}
    for logp_SV, offset_SV in zip(world.reference, world.best_offsets(eta), strict=True):
        scored_SV = logp_SV >= np.sort(logp_SV, axis=1)[:, [-top_k]]
        scored_logp_SV = np.where(scored_SV, logp_SV, -np.inf)
        scored = (scored_logp_SV, scored_logp_SV + offset_SV)
        before_S1, after_S1 = (logsumexp(one, axis=1, keepdims=True) for one in scored)
        subtracted = {
            "none": 0.0,
            "smallest": np.where(scored_SV, offset_SV, np.inf).min(1, keepdims=True),
            "mass": after_S1 - before_S1,
            "value": logsumexp(logp_SV + offset_SV, axis=1, keepdims=True),
        }
        for rule, less in subtracted.items():
            found[rule].append(np.where(scored_SV, offset_SV - less, 0.0))
    return found


@pytest.mark.parametrize(
    ("graded", "both", "gap"), [(True, False, 0.018), (True, True, 0.114), (False, False, 0.75), (False, True, 1.07)]
)
def test_pita_is_off_by_the_logit_of_a_mean_and_by_the_labels_of_the_greedy_path(
    graded: bool, both: bool, gap: float
) -> None:
    world = Enumerable.ascents(graded=graded)
    policy = world.guided(log_odds(world, 0.2, both=both))
    assert world.gap(policy, 0.2) == pytest.approx(gap, rel=0.03)
    lacking = world.objective(world.best(0.2), 0.2) - world.objective(policy, 0.2)
    assert lacking == pytest.approx(0.2 * world.gap(policy, 0.2), abs=1e-9)


def test_the_optimum_beats_every_other_policy() -> None:
    world = Enumerable.ascents(graded=True)
    best = world.best(0.3)
    assert np.exp(log_of_sequences(best)).sum() == pytest.approx(1, abs=1e-12)
    direct = log_of_sequences(world.reference) + world.rewards / 0.3
    assert np.allclose(log_of_sequences(best), direct - logsumexp(direct), atol=1e-12), "π·exp(R/η), normalised"
    rng = np.random.default_rng(1)
    for _ in range(5):
        other = world.guided([offset + 0.3 * rng.standard_normal(offset.shape) for offset in world.best_offsets(0.3)])
        assert world.objective(other, 0.3) < world.objective(best, 0.3)


def test_samples_and_answers_follow_the_reference() -> None:
    world = Enumerable.ascents()
    rewards = world.rewards[numbers_of(sample(world.reference, np.random.default_rng(0), 20_000))]
    assert rewards.mean() == pytest.approx(world.expected_reward(world.reference), abs=0.011)
    found = world.answers([Cut(problem=4, prefix=(3, 4), count=3), Cut(problem=5, greedy=True)], seed=1)
    assert [len(one.completions) for one in found] == [3, 1] and len(found[0].completions[0]) == 3
    assert found[0].rewards == (1.0, 1.0, 1.0), "3, 4 is an ascent"


def test_the_reward_of_ascents() -> None:
    tokens = np.array([[0, 0, 0, 0, 0], [7, 0, 5, 5, 5], [0, 1, 2, 3, 7], [0, 1, 2, 3, 4], [5, 6, 3, 3, 7]])
    assert ascents_reward(tokens).tolist() == [0, 1, 1, 1, 1]
    assert ascents_reward(tokens, graded=True).tolist() == [0, 0.3, 1, 1, 0.4]


def test_a_transformer_is_a_world_whose_prefixes_are_where_its_logits_are() -> None:
    model = endless_transformer(words_tokenizer("abcdefgh")).eval()
    prompt = (2, 1)
    world = Enumerable.of_model(model, prompt, ascents_reward(all_sequences()))
    with torch.no_grad():
        logits_V = model(torch.tensor([[*prompt, 5, 0, 3]])).logits[0, -1, :8].double()
    number = numbers_of(np.array([[5, 0, 3]]))[0]
    assert 0.2 < world.expected_reward(world.reference) < 0.8
    assert np.allclose(world.reference[3][number], torch.log_softmax(logits_V, -1).numpy(), atol=1e-5)
    assert [step.shape for step in world.reference] == [(8**t, 8) for t in range(LENGTH)]
    echo = values_of(lambda ids: ids[:, :, None].float(), prompt)
    assert [step[..., 0].reshape(-1, 8)[0].tolist() for step in echo] == [list(range(8))] * LENGTH
    first = steps_of(lambda ids: model(ids).logits[..., :8], prompt)[0][0]
    assert [float(value) for value in first] == pytest.approx(world.reference[0][0].tolist())


# --- Star graphs, reviews, and the sampler that answers cuts with transformers' `generate` -----------------------


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
