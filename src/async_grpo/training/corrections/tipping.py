"""Says once that a run tips: that its policy leaves the one that sampled, as runs do before they fall apart.

Two signs, each smoothed over `STEPS` optimizer steps because single batches are noisy: the effective sample size of
the tokens is below `LEAST_SHARE`, or the KL to the sampler is `RISE` times its median over the run so far. They have to
last for as many steps: a policy that moves far in the beginning and settles is not one that tips.
`benchmarks/edge.py` measures how many runs that end well are warned of, and what helped the others.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import mean
from typing import Any

from transformers import TrainerCallback

from async_grpo.errors import DiskFullError
from async_grpo.log import logger
from async_grpo.training.corrections.rule import Rule

STEPS = 10
LEAST_SHARE = 0.8  # of the effective sample size
RISE = 3.0  # of the KL to the sampler over its median
LEAST_KL = 0.02  # nats a token; below, a rise costs nothing
SHARE, KL = "async/effective_sample_size", "async/kl_to_sampler"


class Tipping:
    """Looks at the figures of each optimizer step, in their order."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=STEPS)
        self._kls: deque[float] = deque(maxlen=STEPS)
        self._sorted: list[float] = []  # the smoothed KL of each step so far
        self._lasts = 0  # steps in which either sign was there

    def tips(self, share: float, kl: float) -> str:
        """What tips at this step, in a sentence; empty where nothing does.

        Args:
            share: the effective sample size, of 1.
            kl: to the sampler, in nats a token.
        """
        self._shares.append(share)
        self._kls.append(kl)
        if len(self._shares) < STEPS:
            return ""
        smooth_share, smooth_kl = mean(self._shares), mean(self._kls)
        insort(self._sorted, smooth_kl)
        usual = self._sorted[len(self._sorted) // 2]
        is_there = smooth_share < LEAST_SHARE or smooth_kl >= max(LEAST_KL, RISE * usual)
        self._lasts = self._lasts + 1 if is_there else 0
        if self._lasts < STEPS:
            return ""
        return (
            f"over the last {STEPS} steps the effective sample size is {smooth_share:.2f} (1 where rollouts are fresh) "
            f"and the KL to the sampler {smooth_kl:.2g} nats a token, of which the median so far is {usual:.2g}"
        )


GSPO = 'importance_sampling_level="sequence" with epsilon=3e-4 and epsilon_high=4e-4 in the GRPOConfig (GSPO)'


def what_helps(rule: Rule, max_staleness: int, level: str, rate: float) -> list[str]:
    """What a run with these settings can change, in the order of what helped in `benchmarks/edge.py`.

    Args:
        level, rate: `importance_sampling_level` and `learning_rate` of the `GRPOConfig`.
    """
    return [
        *(["--correction bypass, which clips"] if rule.name != "bypass" else []),
        f"half the learning rate, {rate / 2:g}",
        *([f"a --max-staleness below {max_staleness}"] if max_staleness else []),
        *([GSPO] if level == "token" else []),
    ]


def load_of(rate: float, max_staleness: int) -> float:
    """Learning rate x (1 + K): the bias of a stale step grows with rate x K (arXiv 2607.01083)."""
    return rate * (1 + max_staleness)


def tips_again(load: float, tipped_at: float) -> str:
    """A sentence where a run that tipped at the load `tipped_at` begins again at none that is smaller; else empty."""
    if not tipped_at or load < tipped_at:
        return ""
    return (
        f"This run tipped before, when its learning rate times (1 + --max-staleness) was {tipped_at:g}, and now it is "
        f"{load:g}. Take a smaller rate (--set learning_rate=X) or a smaller --max-staleness."
    )


class TippingCallback(TrainerCallback):
    """Warns once.

    Args:
        latest: the figures of the step that has just ended.
        keep: is called with `tips`, the warning, for `status` and the table at the end.
    """

    def __init__(
        self, latest: Callable[[], Mapping[str, float]], helps: list[str], keep: Callable[..., object]
    ) -> None:
        self._latest, self._helps, self._keep = latest, "; ".join(helps), keep
        self._tipping: Tipping | None = Tipping()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        figures = self._latest()
        if self._tipping is None or SHARE not in figures:  # a loss that does not show its log-probabilities
            return
        if what := self._tipping.tips(figures[SHARE], figures[KL]):
            self._tipping = None
            warning = f"The policy runs away from its rollouts at step {state.global_step}: {what}."
            warning += f" What helped in benchmarks, the most helpful first: {self._helps}."
            logger.warning("{}", warning)
            with suppress(DiskFullError):
                self._keep(tips=warning)
