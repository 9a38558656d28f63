"""How a worker's jobs become groups of completions: the seam `Generation`, and the way without code between the tokens.

Where TRL asks for whole completions, once, the engine samples a group from its first token to its last (`Direct`).
Tools, environments, agents and the user's own generation run between the tokens: see `turns`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from async_grpo.errors import USER_ERRORS
from async_grpo.rollout.trl_group import GroupOutcome

if TYPE_CHECKING:
    from async_grpo.records import Job
    from async_grpo.rollout.engines import Engine, PreparedGroup, SampledGroup
    from async_grpo.rollout.trl_group import GeneratedGroup, Scores
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo.settings import WorkerSettings


class Generation(ABC):
    """Makes groups of jobs, and scores them. Made and used by the worker's thread; it scores in others."""

    def __init__(self, trl: RolloutTrainer, engine: Engine) -> None:
        self._trl, self._engine = trl, engine
        self.joins = engine.capabilities.joins  # jobs can be started while others are generated

    @property
    def most_groups(self) -> int:
        """How many groups may be generated together."""
        return self._engine.most_groups

    @abstractmethod
    def start(self, jobs: Sequence[Job], version: int) -> None:
        """Take in jobs that this policy version is to generate."""

    @abstractmethod
    def step(self) -> list[GroupOutcome]:
        """Have the engine sample one token more of all groups; returns those that have ended."""

    @abstractmethod
    def close(self) -> None:
        """Drop the groups that have not ended. It can be used again."""

    def score(self, groups: Sequence[GeneratedGroup]) -> list[Scores]:
        """The scores of each group, from one call of the reward functions."""
        return self._trl.score(groups)

    def let_go(self, group: GeneratedGroup) -> None:  # noqa: B027  # a subclass may keep something of it
        """The group will not be scored again."""


def generation(trl: RolloutTrainer, engine: Engine, settings: WorkerSettings | None = None) -> Generation:
    """As the trainer generates."""
    from async_grpo.rollout.turns.groups import Turns

    return Direct(trl, engine) if trl.samples_whole else Turns(trl, engine, settings)


class Direct(Generation):
    """TRL makes the prompts, the engine samples, and TRL makes completions of what was sampled."""

    def __init__(self, trl: RolloutTrainer, engine: Engine) -> None:
        super().__init__(trl, engine)
        self._prepared: list[PreparedGroup] = []
        self._failed: list[GroupOutcome] = []  # before they had a prompt

    def start(self, jobs: Sequence[Job], version: int) -> None:
        for job in jobs:
            try:
                self._prepared.append(self._trl.prepare(job, version))
            except USER_ERRORS as error:  # a row or a template that TRL cannot take
                self._failed.append(GroupOutcome(job=job, error=error))

    def step(self) -> list[GroupOutcome]:
        prepared, self._prepared = self._prepared, []
        failed, self._failed = self._failed, []
        return [*failed, *map(self._outcome, self._engine.sample(prepared))]

    def close(self) -> None:
        self._prepared.clear()
        self._failed.clear()
        self._engine.close()

    def _outcome(self, sampled: SampledGroup) -> GroupOutcome:
        job = sampled.prepared.job
        if sampled.error is not None:
            return GroupOutcome(job=job, error=sampled.error)
        try:
            return GroupOutcome(job=job, group=self._trl.finish(sampled))
        except USER_ERRORS as error:  # a completion that TRL cannot parse
            return GroupOutcome(job=job, error=error)
