"""Select completions to read: the newest, the worst, the best, those of a step or of a job."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

from async_grpo.archive.groups import WAITING, FinishedGroup, FinishedGroups, GroupFate
from async_grpo.queue.names import NOT_TRAINED_ON
from async_grpo.records import RolloutGroup

NEWEST, WORST, BEST = "newest", "worst", "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One completion, with everything around it."""

    found: FinishedGroup
    index: int  # in its group
    advantage: float | None  # None: groups of its batch were trimmed, or a critic has made it

    @property
    def total(self) -> float:
        """The weighted reward; NaN where no function gave one."""
        return float(self.found.totals[self.index])

    @property
    def length(self) -> int:
        """Tokens."""
        return int(self.found.group.completion_lengths[self.index])

    @property
    def rewards(self) -> dict[str, float]:
        """By function; NaN where it gave none."""
        group = self.found.group
        return dict(zip(group.reward_names, group.rewards[self.index].tolist(), strict=True))

    @property
    def own_prompt(self) -> list[tuple[str, Any]]:
        """Its prompt, where the prompts of its group differ."""
        group = self.found.group
        return [("prompt", group.prompt(self.index))] if len(group.prompts) > 1 else []

    @property
    def turn_rewards(self) -> list[float]:
        """One a turn, NaN for none; empty where no turn has one."""
        rewards = self.found.group.rewards_of_turns()[self.index]
        return [] if all(map(math.isnan, rewards)) else rewards

    @property
    def columns(self) -> list[tuple[str, Any]]:
        """Its own values beside the text: the prompt, turn rewards, and what reward functions logged (`log_extra`)."""
        extra = self.found.group.extra_columns
        turns = [("turn rewards", in_a_line(self.turn_rewards))] if self.turn_rewards else []
        return self.own_prompt + turns + [(name, values[self.index]) for name, values in extra.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rollouts that were picked, in the order asked for."""

    rollouts: list[Rollout]
    completions: int  # that were looked through
    more: bool  # whether there are older ones that were not looked at


def in_a_line(rewards: Iterable[float]) -> str:
    """Rewards in a line; NaN is none."""
    return "  ".join("none" if math.isnan(reward) else f"{reward:.3g}" for reward in rewards)


def row_of(group: RolloutGroup) -> dict[str, Any]:
    """The dataset row, with the prompt that an environment made of it where all completions have the same."""
    return {**group.job.row, "prompt": group.prompts[0]} if len(group.prompts) == 1 else group.job.row


def select(
    groups: FinishedGroups,
    *,
    order: str = NEWEST,
    limit: int | None,
    step: int | None = None,
    job: int | None = None,
    evaluations: bool = False,
    node: str | None = None,
) -> Selection:
    """Pick completions of finished groups; of one optimizer step or one job if asked.

    In every order, groups that no step has used (not yet, or left over when the run ended) come last.

    evaluations: of groups of evaluations; `step` is then the version that was evaluated. Always so of a run that
    trains nothing.
    node: only what this machine generated.
    """
    evaluations = evaluations or bool(groups.state.plan.models)
    if evaluations if job is None else job >= NOT_TRAINED_ON:
        return _pick(_of_node(_evaluated(groups, step, job), node), order, limit)
    fates = groups.fates()
    if job is not None:
        found = groups.all(fates, only={job})
    elif step is not None:
        found = groups.all(fates, only={seq for seq, fate in fates.items() if fate.step == step})
    else:
        found = chain(groups.all(fates, only=fates), groups.all(fates, without=fates))
    return _pick(_of_node(_rollouts(groups, found, fates), node), order, limit)


def _of_node(rollouts: Iterator[Rollout], node: str | None) -> Iterator[Rollout]:
    return rollouts if node is None else (rollout for rollout in rollouts if rollout.found.group.node == node)


def _evaluated(groups: FinishedGroups, version: int | None, job: int | None) -> Iterator[Rollout]:
    for found in groups.evaluated():
        if version in (None, found.group.policy_version) and job in (None, found.group.job.seq):
            yield from _of_group(found, None)


def _pick(everything: Iterator[Rollout], order: str, limit: int | None) -> Selection:
    if order == NEWEST:
        picked = list(islice(everything, limit))
        return Selection(rollouts=picked, completions=len(picked), more=next(everything, None) is not None)
    counter = count()  # of the completions that are looked through
    picked = _extreme((rollout for rollout, _ in zip(everything, counter)), order, limit)
    return Selection(rollouts=picked, completions=next(counter), more=False)


def _extreme(rollouts: Iterable[Rollout], order: str, limit: int | None) -> list[Rollout]:
    """The lowest or highest rewards first, the newest of equal ones first; what has no reward is left out."""
    sign = 1.0 if order == WORST else -1.0

    def key(it: Rollout) -> tuple[bool, float, int]:
        return it.found.fate.state == WAITING, sign * it.total, -it.found.group.job.seq

    scored = (rollout for rollout in rollouts if not math.isnan(rollout.total))
    return sorted(scored, key=key) if limit is None else heapq.nsmallest(limit, scored, key=key)


def _rollouts(groups: FinishedGroups, found: Iterable[FinishedGroup], fates: dict[int, GroupFate]) -> Iterator[Rollout]:
    if not groups.rule.in_groups:
        for group in found:
            yield from _of_group(group, None)
        return
    if not groups.rule.needs_whole_batch:
        for group in found:
            (advantages,) = groups.rule.advantages([group.group.rewards])
            yield from _of_group(group, advantages.tolist())
        return
    sizes = Counter(fate.batch for fate in fates.values() if fate.batch is not None)
    gathered: dict[int, list[FinishedGroup]] = {}
    for group in found:
        batch = group.fate.batch
        if batch is None:
            yield from _of_group(group, None)
            continue
        together = gathered.setdefault(batch, [])
        together.append(group)
        if len(together) == sizes[batch]:
            for member, advantages in zip(
                together, groups.rule.advantages([it.group.rewards for it in together]), strict=True
            ):
                yield from _of_group(member, advantages.tolist())
            del gathered[batch]
    for together in gathered.values():  # some of their groups were trimmed
        for member in together:
            yield from _of_group(member, None)


def _of_group(found: FinishedGroup, advantages: list[float] | None) -> Iterator[Rollout]:
    for index in range(found.group.job.num_generations):
        yield Rollout(found=found, index=index, advantage=None if advantages is None else advantages[index])
