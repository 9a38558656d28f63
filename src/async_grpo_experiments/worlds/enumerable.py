"""Sequences of 5 tokens out of 8: all 32,768 are enumerated, and every value is exact, by recursion in float64.

Prefixes of t tokens are numbered 0 … 8^t − 1, the first token being the highest digit of base 8. Letters after names
are shapes: S prefixes of one length, V candidates of the next token, K atoms of the return.

A policy is a list of log-probabilities, one array [S, V] for each of the 5 steps. So is a set of offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp

from async_grpo_experiments.algorithms.protocols import Continuations, Cut

TOKENS = 8
LENGTH = 5
SEQUENCES = TOKENS**LENGTH
LETTERS = "abcdefgh"  # the tokens as texts have them
ROWS = 4096  # that a model evaluates at once

Floats: TypeAlias = NDArray[np.float64]
Steps: TypeAlias = list[Floats]  # one array [S, V] for each step


@dataclass(frozen=True)
class Enumerable:
    """A reference π and a reward, of which every value is known."""

    reference: Steps  # log π(a|s), as it samples
    rewards: Floats  # one for each sequence, [32768]
    prompt: tuple[int, ...] = (0,)  # token ids before the sequence, where a model reads them

    @classmethod
    def tables(cls, *, graded: bool = False) -> Enumerable:
        """Random logits for every prefix, where nothing generalises; the reward is 1 for a tenth, or graded."""
        rng = np.random.default_rng(0)
        reference = [log_softmax(1.5 * rng.standard_normal((TOKENS**t, TOKENS)), -1) for t in range(LENGTH)]
        if graded:
            return cls(reference, np.round(10 * rng.beta(0.6, 2, SEQUENCES)) / 10)
        return cls(reference, (rng.random(SEQUENCES) < 0.1).astype(np.float64))

    @classmethod
    def ascents(cls, *, graded: bool = False) -> Enumerable:
        """Each token depends on the one before it; the reward is for tokens that are their predecessor + 1."""
        logits = [np.random.default_rng(7 + t).standard_normal((TOKENS, TOKENS)) for t in range(LENGTH)]
        last = [np.arange(TOKENS**t) % TOKENS for t in range(LENGTH)]
        reference = [log_softmax(logits[t][last[t]], -1) for t in range(LENGTH)]
        return cls(reference, ascents_reward(all_sequences(), graded=graded))

    @classmethod
    def of_model(cls, model: Any, prompt: tuple[int, ...], rewards: Floats, temperature: float = 1.0) -> Enumerable:
        """The world of a causal language model as reference: of its first 8 tokens, if it never says another one."""
        return cls(steps_of(lambda ids: model(ids).logits[..., :TOKENS] / temperature, prompt), rewards, prompt)

    def backward(self, ends: Floats, join: Callable[[Floats, Floats], Floats]) -> Steps:
        """Values of prefixes that include the candidate, by recursion from those of whole sequences.

        Args:
            ends: [32768, …], the values of the whole sequences.
            join: makes values [S, …] of log π(a|s) [S, V] and values [S, V, …].
        """
        steps: Steps = []
        for logp_SV in reversed(self.reference):
            steps.append(ends.reshape(*logp_SV.shape, *ends.shape[1:]))
            ends = join(logp_SV, steps[-1])
        return steps[::-1]

    def chances(self, levels: Sequence[float]) -> Steps:
        """The distribution of the return over the levels: arrays [S, V, K]."""
        ends_SK = np.isclose(self.rewards[:, None], np.asarray(levels)).astype(np.float64)
        assert (ends_SK.sum(1) == 1).all(), "every reward is one of the levels"
        return self.backward(ends_SK, lambda logp, chances: (np.exp(logp)[..., None] * chances).sum(1))

    def means(self) -> Steps:
        """E_π[z | sa]."""
        return self.backward(self.rewards, lambda logp, means: (np.exp(logp) * means).sum(1))

    def best_offsets(self, eta: float) -> Steps:
        """log E_π[exp(z/η) | sa], which π* adds to log π(a|s)."""
        return self.backward(self.rewards / eta, lambda logp, values: logsumexp(logp + values, axis=1))

    def best(self, eta: float) -> Steps:
        """π*, the optimum of E_q[R] − η·KL(q‖π)."""
        return self.guided(self.best_offsets(eta))

    def guided(self, offsets: Steps) -> Steps:
        """q(a|s) ∝ π(a|s)·exp(o(sa))."""
        return [log_softmax(logp + offset, -1) for logp, offset in zip(self.reference, offsets, strict=True)]

    def divergence(self, policy: Steps, other: Steps | None = None) -> float:
        """KL(policy‖other) of whole sequences, in nats; `other` is the reference by default."""
        log_q, log_p = (log_of_sequences(steps) for steps in (policy, other or self.reference))
        return float((np.exp(log_q) * (log_q - log_p)).sum())

    def expected_reward(self, policy: Steps) -> float:
        return float((np.exp(log_of_sequences(policy)) * self.rewards).sum())

    def objective(self, policy: Steps, eta: float) -> float:
        """E_q[R] − η·KL(q‖π); η·KL(q‖π*) is what `policy` lacks of the most."""
        return self.expected_reward(policy) - eta * self.divergence(policy)

    def gap(self, policy: Steps, eta: float) -> float:
        """KL(policy‖π*), in nats."""
        return self.divergence(policy, self.best(eta))

    def preferred(self, beta: float, *, both: bool) -> Steps:
        """P(b ≻ a) by prefix, as PITA's head learns it without error: a the greedy path, b sampled from a cut of it.

        Args:
            both: the greedy one of a pair is labelled as well, with 1 − P; cuts are uniform over its positions.
        """
        path = sample(self.reference, np.random.default_rng(0), 1, greedy=True)
        ends = 1 / (1 + np.exp(-beta * (self.rewards - self.rewards[numbers_of(path)])))
        steps = self.backward(ends, lambda logp, chances: (np.exp(logp) * chances).sum(1))
        if not both:
            return steps
        at_start = np.exp(self.reference[0][0]) @ steps[0][0]
        before = [at_start, *(steps[t][_index(path, t)] for t in range(LENGTH))]
        for t in range(LENGTH):  # the greedy path is labelled by every cut before its token t
            weights = [
                np.exp(sum(self.reference[u][_index(path, u)] for u in range(cut, t + 1))) for cut in range(t + 1)
            ]
            labels = sum(1 - before[cut] for cut in range(t + 1)) + sum(weights) * before[t + 1]
            steps[t][_index(path, t)] = labels / (t + 1 + sum(weights))
        return steps

    def answers(self, cuts: Sequence[Cut], seed: int, head: Steps | None = None) -> list[Continuations]:
        """Continuations for the cuts of a plan, sampled from π; `head` has the offsets of guided ones."""
        rng = np.random.default_rng(seed)
        guided = None if head is None else self.guided(head)
        found = []
        for cut in cuts:
            policy = guided if cut.guided and guided is not None else self.reference
            drawn = sample(policy, rng, cut.count, cut.prefix, greedy=cut.greedy)
            completions = tuple(tuple(row) for row in drawn[:, len(cut.prefix) :].tolist())
            rewards = tuple(self.rewards[numbers_of(drawn)].tolist())
            found.append(Continuations(cut=cut, prompt=self.prompt, completions=completions, rewards=rewards))
        return found


def all_sequences(length: int = LENGTH) -> NDArray[np.int64]:
    """The tokens of every sequence of this length, in the order of their numbers: [8^length, length]."""
    return np.indices((TOKENS,) * length).reshape(length, TOKENS**length).T


def numbers_of(tokens_NT: NDArray[np.int64]) -> NDArray[np.int64]:
    return tokens_NT @ TOKENS ** np.arange(tokens_NT.shape[1])[::-1]


def ascents_reward(tokens_NT: NDArray[np.int64], *, graded: bool = False) -> Floats:
    """1 where a token is its predecessor + 1 modulo 8; graded: .3 for each such token, .1 for a 7 at the end."""
    ascents_N = (tokens_NT[:, 1:] == (tokens_NT[:, :-1] + 1) % TOKENS).sum(1)
    if graded:
        return np.minimum(1.0, np.round(0.3 * ascents_N + 0.1 * (tokens_NT[:, -1] == TOKENS - 1), 1))
    return (ascents_N >= 1).astype(np.float64)


def _index(path_1T: NDArray[np.int64], t: int) -> tuple[int, int]:
    """Where the path's token t stands in an array [S, V]."""
    return int(numbers_of(path_1T[:, :t])[0]), int(path_1T[0, t])


def letters_rows(count: int) -> list[dict[str, str]]:
    """Rows of a dataset: a letter each as prompt."""
    return [{"prompt": LETTERS[index % TOKENS]} for index in range(count)]


def ascents_of_letters(completions: Sequence[str], **_: Any) -> list[float]:
    """The reward of *ascents* for texts such as `a b d d e`."""
    return [_of_letters(completion, graded=False) for completion in completions]


def graded_ascents_of_letters(completions: Sequence[str], **_: Any) -> list[float]:
    return [_of_letters(completion, graded=True) for completion in completions]


def _of_letters(text: str, *, graded: bool) -> float:
    tokens = [[LETTERS.index(word) for word in text.split() if word in LETTERS]]
    return float(ascents_reward(np.array(tokens), graded=graded)[0]) if tokens[0] else 0.0


def log_of_sequences(steps: Steps) -> Floats:
    """The log-probability of every sequence, [32768]."""
    total = np.zeros(1)
    for step in steps:
        total = (total[:, None] + step).reshape(-1)
    return total


def sample(
    policy: Steps, rng: np.random.Generator, count: int, prefix: Sequence[int] = (), *, greedy: bool = False
) -> NDArray[np.int64]:
    """Sequences [count, 5] that begin with the prefix."""
    tokens_NT = np.tile(np.asarray(prefix, dtype=np.int64), (count, 1))
    for t in range(len(prefix), LENGTH):
        scores_NV = policy[t][numbers_of(tokens_NT)]
        noise_NV = 0.0 if greedy else rng.gumbel(size=scores_NV.shape)
        tokens_NT = np.column_stack([tokens_NT, (scores_NV + noise_NV).argmax(1)])
    return tokens_NT


def values_of(evaluate: Callable[[Any], Any], prompt: tuple[int, ...]) -> Steps:
    """What a value head says of every prefix and candidate: arrays [S, V, K], from its logits [N, T, K].

    Args:
        evaluate: the head: it gets ids [N, T], prompt and sequence.
    """
    found_NTK = _at_all_prefixes(evaluate, prompt, LENGTH)
    firsts = [found_NTK[:: TOKENS ** (LENGTH - 1 - t), len(prompt) + t] for t in range(LENGTH)]
    return [first_NK.reshape(TOKENS**t, TOKENS, -1) for t, first_NK in enumerate(firsts)]


def steps_of(evaluate: Callable[[Any], Any], prompt: tuple[int, ...]) -> Steps:
    """The policy of a causal language model, from its logits [N, T, V]."""
    found_NTV = _at_all_prefixes(evaluate, prompt, LENGTH - 1)
    firsts = [found_NTV[:: TOKENS ** (LENGTH - 1 - t), len(prompt) + t - 1] for t in range(LENGTH)]
    return [log_softmax(first_SV, -1) for first_SV in firsts]


def _at_all_prefixes(evaluate: Callable[[Any], Any], prompt: tuple[int, ...], length: int) -> Floats:
    """The logits of the prompt and every prefix of this length, [N, T, …]; N is 8^length."""
    import torch

    tokens_NT = all_sequences(length)
    ids_NT = torch.from_numpy(np.column_stack([np.tile(prompt, (len(tokens_NT), 1)), tokens_NT]))
    with torch.no_grad():
        found: Floats = torch.cat([evaluate(part).double() for part in torch.split(ids_NT, ROWS)]).numpy()
    return found
