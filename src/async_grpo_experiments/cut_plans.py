"""The plan of an algorithm, which asks for cuts, as a plan of `async-grpo generate`, which asks for requests.

trainer.generation_plan = requests_of(algorithm.plan, trainer)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from async_grpo.archive.advantages import AdvantageRule
from async_grpo.errors import UnsupportedError
from async_grpo.evals.asking import Plan, SampleRequest
from async_grpo.records import RolloutGroup
from async_grpo.setup.generator_choice import HF
from async_grpo.setup.sampling import effective_sampling
from async_grpo_experiments.algorithms import protocols
from async_grpo_experiments.algorithms.protocols import Continuations, Cut


def requests_of(
    plan: Callable[[int], protocols.Plan], trainer: Any, *, unguided: Mapping[str, Any] | None = None
) -> Callable[[int], Plan]:
    """Return the plan that asks for the same cuts. A cut that failed has no continuations.

    Args:
        unguided: sampling settings of the cuts that the reference continues.

    Raises:
        UnsupportedError: the trainer's sampler is truncated.
    """
    if truncated := effective_sampling(trainer, HF).truncation:
        raise UnsupportedError(
            f"{', '.join(truncated)} with a plan of values: values are of the untruncated sampler. Set top_p to 1, "
            "top_k to 0 and min_p to None in the GRPOConfig."
        )
    totals = AdvantageRule().totals  # with equal weights

    def request(cut: Cut) -> SampleRequest:
        greedy = {"temperature": 0.0} if cut.greedy else {}
        sampling = {**({} if cut.guided else unguided or {}), **greedy}
        return SampleRequest(problem=cut.problem, samples=cut.count, prefix_ids=cut.prefix, sampling=sampling)

    def answered(cut: Cut, group: RolloutGroup) -> Continuations:
        ends = group.completion_lengths.cumsum().tolist()
        starts = [end - length + len(cut.prefix) for end, length in zip(ends, group.completion_lengths.tolist())]
        ids = group.completion_ids.tolist()
        return Continuations(
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
