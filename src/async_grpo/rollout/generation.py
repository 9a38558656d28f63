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
    from async_grpo.engines import Engine, PreparedGroup
    from async_grpo.records import Job
    from async_grpo.rollout.trl_trainer import RolloutTrainer
    from async_grpo.settings import WorkerSettings


class Generation(ABC):
    """Makes groups of jobs. Made and used by the worker's thread."""

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
        outcomes, self._failed = self._failed, []
        for sampled in self._engine.sample(prepared):
            group, error = None, sampled.error
            try:
                if error is None:
                    group = self._trl.finish(sampled)
            except USER_ERRORS as raised:  # a completion that TRL cannot parse
                error = raised
            outcomes.append(GroupOutcome(job=sampled.prepared.job, group=group, error=error))
        return outcomes

    def close(self) -> None:
        self._prepared.clear()
        self._failed.clear()
        self._engine.close()
