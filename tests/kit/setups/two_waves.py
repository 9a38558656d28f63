"""A setup file for tests of `generate`: each problem is sampled once, and continued twice from a cut."""

from collections.abc import Sequence

import random_model
from trl import GRPOTrainer

from async_grpo.evals.asking import Plan, SampleRequest
from async_grpo.records import RolloutGroup


def plan(problems: int) -> Plan:
    groups: Sequence[RolloutGroup | None]
    groups = yield [SampleRequest(problem=problem) for problem in range(problems)]
    cuts = {problem: 1 + problem % 3 for problem in range(problems)}
    yield [
        SampleRequest(problem=problem, samples=2, prefix_ids=tuple(group.completion_ids.tolist()[: cuts[problem]]))
        for problem, group in enumerate(groups)
        if group is not None and len(group.completion_ids) > cuts[problem]
    ]


def get_trainer() -> GRPOTrainer:
    trainer = random_model.get_trainer()
    trainer.generation_plan = plan
    return trainer
