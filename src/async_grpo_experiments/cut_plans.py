"""The plan of an algorithm, which asks for cuts, as a plan of `async-grpo generate`, which asks for requests.

trainer.generation_plan = requests_of(algorithm.plan, Continuations)
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.evals.asking import Plan, SampleRequest
from async_grpo.records import RolloutGroup


class CutLike(Protocol):
    """What `algorithms.protocols.Cut` has."""

    @property
    def problem(self) -> int: ...
    @property
    def prefix(self) -> tuple[int, ...]: ...
    @property
    def count(self) -> int: ...
    @property
    def greedy(self) -> bool: ...
    @property
    def guided(self) -> bool: ...


C = TypeVar("C", bound=CutLike)
A = TypeVar("A")


def requests_of(
    plan: Callable[[int], Generator[Sequence[C], Sequence[A], None]],
    answer: Callable[..., A],
    *,
    rule: AdvantageRule | None = None,
    unguided: Mapping[str, Any] | None = None,
) -> Callable[[int], Plan]:
    """Return the plan that asks for the same cuts.

    Args:
        answer: makes what the algorithm's plan is sent of `cut`, `prompt`, `completions` and `rewards`. A cut that
            failed has no answer.
        rule: how the rewards of a completion are added up; None: with equal weights.
        unguided: sampling settings of the cuts that the reference continues.
    """
    totals = (rule or AdvantageRule()).totals

    def request(cut: C) -> SampleRequest:
        greedy = {"temperature": 0.0} if cut.greedy else {}
        sampling = {**({} if cut.guided else unguided or {}), **greedy}
        return SampleRequest(problem=cut.problem, samples=cut.count, prefix_ids=cut.prefix, sampling=sampling)

    def answered(cut: C, group: RolloutGroup) -> A:
        ends = group.completion_lengths.cumsum().tolist()
        starts = [end - length + len(cut.prefix) for end, length in zip(ends, group.completion_lengths.tolist())]
        ids = group.completion_ids.tolist()
        return answer(
            cut=cut,
            prompt=tuple(group.prompt_ids.tolist()),
            completions=tuple(tuple(ids[start:end]) for start, end in zip(starts, ends, strict=True)),
            rewards=tuple(totals(group.rewards).tolist()),
        )

    def requests(problems: int) -> Plan:
        cuts = plan(problems)
        wave = next(cuts, None)
        while wave is not None:
            groups = yield [request(cut) for cut in wave]
            found = [answered(cut, group) for cut, group in zip(wave, groups, strict=True) if group is not None]
            try:
                wave = cuts.send(found)
            except StopIteration:
                return

    return requests
