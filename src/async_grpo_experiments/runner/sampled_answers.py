"""What `async-grpo generate` has sampled for an algorithm's plan, in the shape in which the plan is answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from async_grpo_experiments.algorithms.protocols import Continuations, Cut


class SampledAnswers:
    """Answers to the cuts of a plan: the rows that `async-grpo generate` has sampled by the same plan.

    Args:
        samples: the rows.
        rewards: one for each row.
        verified: whether a reward is 1 for what is right and 0 for all else.
    """

    def __init__(self, samples: Iterable[Mapping[str, Any]], rewards: Sequence[float], *, verified: bool) -> None:
        self._by_request: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
        for row, reward in zip(samples, rewards, strict=True):
            place = row["wave"], row["problem"], row["request"]
            self._by_request.setdefault(place, []).append({**row, "reward": reward})
        self._wave, self._verified = -1, verified

    def answer(self, cuts: Sequence[Cut]) -> list[Continuations]:
        """Answer the next wave of cuts. A cut that failed has no answer."""
        self._wave += 1
        before: dict[int, int] = {}
        found = []
        for cut in cuts:
            place = before[cut.problem] = before.get(cut.problem, -1) + 1
            if rows := self._by_request.get((self._wave, cut.problem, place)):
                found.append(_continuations(cut, rows, self._verified))
        return found


def _continuations(cut: Cut, rows: Sequence[Mapping[str, Any]], verified: bool) -> Continuations:
    rewards = tuple(float(row["reward"]) for row in rows)
    return Continuations(
        cut=cut,
        prompt=tuple(rows[0]["prompt_ids"]),
        completions=tuple(tuple(row["completion_ids"][len(cut.prefix) :]) for row in rows),
        rewards=rewards,
        correct=tuple(reward == 1 for reward in rewards) if verified else (),
    )
