"""The figures of an evaluation, each a mean over problems with its 95% interval.

n completions were sampled for each problem, in an order that does not depend on their rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

CONFIDENCE = 0.95
SHARES = ("success_rate", "pass", "pass_ordered", "maj")  # figures that are shares, whatever follows their @
Range = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The n completions of one problem."""

    rewards: Sequence[float]  # [n]
    successes: Sequence[bool]  # [n]
    finals: Sequence[str | None] | None = None  # [n], the final answers, to vote on; None: nobody can tell them
    divergences: Sequence[float] | None = None  # [n], nats from the reference; None: nobody has computed them
    lengths: Sequence[int] = ()  # [n], tokens
    task: str = ""
    source: str = ""  # of the row, its `data_source`


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over problems, and the interval that holds it in 95 of 100 sets of problems."""

    value: float
    low: float | None  # None: there is no interval
    high: float | None
    problems: int

    @property
    def interval(self) -> str:
        """`0.912 … 0.954`; empty where there is none."""
        return "" if self.low is None or self.high is None else f"{self.low:.3f} … {self.high:.3f}"

    def __str__(self) -> str:
        return f"{self.value:.3f}" + (f" ({self.interval})" if self.interval else "")


def estimates(problems: Sequence[Answers], ks: Iterable[int]) -> dict[str, Estimate]:
    """Every figure of these problems, by name. A `k` that is larger than some problem's n raises `ValueError`."""
    every_reward = [reward for answers in problems for reward in answers.rewards]
    rewards = (0.0, 1.0) if are_right_or_wrong(every_reward) else None
    found = {
        name: problems_with_interval(values, range_of(name) or rewards)
        for name, values in values_of(problems, ks).items()
    }
    spread = stdev(every_reward) if len(every_reward) > 1 else 0.0
    found["reward_std"] = Estimate(value=spread, low=None, high=None, problems=len(problems))
    return found


def differences(ours: Sequence[Answers], theirs: Sequence[Answers], ks: Iterable[int]) -> dict[str, Estimate]:
    """Ours less theirs, by figure, over the same problems in the same order."""
    ks = sorted(set(ks))
    other = values_of(theirs, ks)
    return {
        name: mean_with_interval([a - b for a, b in zip(values, other[name], strict=True)], range_of_difference(name))
        for name, values in values_of(ours, ks).items()
        if name in other  # only one side may have final answers
    }


def values_of(problems: Sequence[Answers], ks: Iterable[int]) -> dict[str, list[float]]:
    figures: dict[str, Callable[[Answers], float]] = {
        "success_rate": lambda answers: fmean(answers.successes),
        "reward_mean": lambda answers: fmean(answers.rewards),
    }
    if all(answers.divergences is not None for answers in problems):
        figures["avg_kl"] = lambda answers: fmean(answers.divergences or ())
        figures["avg_kl_per_token"] = lambda answers: sum(answers.divergences or ()) / sum(answers.lengths)
    for k in sorted(set(ks)):
        figures |= _at(k, vote=all(answers.finals is not None for answers in problems))
    return {name: [figure(one) for one in problems] for name, figure in figures.items()}


def _at(k: int, *, vote: bool) -> dict[str, Callable[[Answers], float]]:
    figures: dict[str, Callable[[Answers], float]] = {
        f"pass@{k}": lambda answers: pass_at_k(len(answers.successes), sum(answers.successes), k),
        f"pass_ordered@{k}": lambda answers: float(any(answers.successes[:k])),
        f"mean@{k}": lambda answers: fmean(answers.rewards[:k]),
        f"best@{k}": lambda answers: max(answers.rewards[:k]),
    }
    if vote:
        figures[f"maj@{k}"] = lambda answers: majority_at_k(answers, k)
    return figures


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of k completions succeeds, from c successes among n: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", arXiv 2107.03374, section 2.1).
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= c <= n, got n = {n}, c = {c}.")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Answers, k: int) -> float:
    """1 if the commonest final answer of the first k completions is right, else 0; of equally common ones the first.

    Completions without a final answer do not vote (Wang et al. 2022, "Self-Consistency", arXiv 2203.11171, section 2).
    """
    assert answers.finals is not None
    votes = [final for final in answers.finals[:k] if final is not None]
    if not votes:
        return 0.0
    winner = Counter(votes).most_common(1)[0][0]
    pairs = zip(answers.finals[:k], answers.successes[:k], strict=True)
    return float(any(success for final, success in pairs if final == winner))


def are_right_or_wrong(rewards: Iterable[float]) -> bool:
    """Whether each reward is 0 or 1."""
    return all(reward in (0.0, 1.0) for reward in rewards)


def range_of(figure: str) -> Range | None:
    """The least and the greatest value that a figure can have; None: it depends on the reward functions."""
    if figure == "reward_std" or figure.startswith("avg_kl"):
        return (0.0, math.inf)
    return (0.0, 1.0) if _is_share(figure) else None


def range_of_difference(figure: str) -> Range | None:
    """The same for the difference of two values of a figure."""
    return (-1.0, 1.0) if _is_share(figure) else None


def _is_share(figure: str) -> bool:
    return figure.partition("@")[0] in SHARES


def problems_with_interval(values: Sequence[float], within: Range | None) -> Estimate:
    """The mean of one value a problem. Where each is right or wrong the interval is Wilson's, else Student's.

    Wilson's stays between 0 and 1, and says how little 20 right ones of 20 problems show (Wilson 1927, "Probable
    Inference, the Law of Succession, and Statistical Inference").
    """
    if within != (0.0, 1.0) or len(values) < 2 or not are_right_or_wrong(values):
        return mean_with_interval(values, within)
    from scipy.special import ndtri

    n, share = len(values), fmean(values)
    z = float(ndtri((1 + CONFIDENCE) / 2))
    middle, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    low, high = ((middle + sign * spread) / (1 + z * z / n) for sign in (-1, 1))
    return Estimate(value=share, low=max(0.0, low), high=min(1.0, high), problems=n)


def mean_with_interval(values: Sequence[float], within: Range | None = None) -> Estimate:
    """The mean of independent values, with Student's t interval, cut to `within`; none for a single one."""
    from scipy.special import stdtrit

    mean, n = fmean(values), len(values)
    if n < 2:
        return Estimate(value=mean, low=None, high=None, problems=n)
    half = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * stdev(values) / math.sqrt(n)
    low, high = within or (-math.inf, math.inf)
    return Estimate(value=mean, low=max(low, mean - half), high=min(high, mean + half), problems=n)
