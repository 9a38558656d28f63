"""TRL's trainer with turn rewards. The private names of TRL's trainer that it touches are `HOOKS`, and in this file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.trainer.utils import get_callable_name, is_async_callable

from async_grpo.credit.formulas import (
    CREDITS,
    Credit,
    Given,
    RewardedTurns,
    known_sum,
    of_each_turn,
    per_token,
    turn_starts,
)
from async_grpo.log import logger
from async_grpo.records import RolloutGroup
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.rank_share import own_share

HOOKS = ("_calculate_rewards", "_generate", "_generate_and_score_completions")

_given_now: ContextVar[dict[int, list[Given]] | None] = ContextVar("what turn reward functions return", default=None)


class TurnGRPOTrainer(Algorithm, GRPOTrainer):
    """A `GRPOTrainer` in which each turn of a dialogue has its own advantage.

    Args:
        turn_reward_funcs: called as `reward_funcs` are; each returns for each completion one number, or a list with one
            for each turn. A turn is what the model writes at a stretch: a run of 1 in TRL's `tool_mask`. One number
            counts for the first turn. `reward_weights` has the weights of `reward_funcs`, then of these.
        credit: `outcome`, `merged`, `turn`, `cae`, `recursive` or `reward_to_go` (`Credit` has the formulas).
        turn_advantage_coef: weighs the turn advantage of `turn`.
        turn_discount: alpha of `cae`, `recursive` and `reward_to_go`.
        no_turn_reward: turn rewards are measured and not trained on.
        original: `turn` as the authors' code has it where it differs from the paper.

    Raises:
        ValueError: the credit is unknown, the configuration compares rewards in another way than within a group, or
            `recursive` is asked for where the model decides how many turns a completion has.
    """

    own_loss = False
    group_columns = ("turn_rewards", "turn_counts")

    reward_func_names: list[str]
    batch_rewards: torch.Tensor  # [B, F], of the batch that was scored last
    _served_turns: list[list[float]] | None = None  # of that batch, where workers scored it

    def __init__(
        self,
        *args: Any,
        turn_reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
        credit: str = "turn",
        turn_advantage_coef: float = 1.0,
        turn_discount: float = 1.0,
        no_turn_reward: bool = False,
        original: bool = False,
        **kwargs: Any,
    ) -> None:
        if credit not in CREDITS:
            raise ValueError(f"credit must be one of {', '.join(CREDITS)}, got {credit!r}.")
        of_turns = [turn_reward_funcs] if callable(turn_reward_funcs) else list(turn_reward_funcs)
        bound = inspect.signature(GRPOTrainer.__init__).bind(self, *args, **kwargs)
        outcome = bound.arguments.get("reward_funcs") or []
        outcome = list(outcome) if isinstance(outcome, list) else [outcome]
        bound.arguments["reward_funcs"] = outcome + [_summing(*each) for each in enumerate(of_turns)]
        if isinstance(processing := bound.arguments.get("reward_processing_classes"), list):
            bound.arguments["reward_processing_classes"] = processing + [None] * len(of_turns)
        self._turn_columns = range(len(outcome), len(outcome) + len(of_turns))
        super().__init__(*bound.args[1:], **bound.kwargs)
        _refuse_other_comparisons(self)
        if credit == "recursive" and not no_turn_reward:
            _refuse_free_turns(self)
        self.reward_func_names = [
            f"{'turn' if column in self._turn_columns else 'outcome'}/{name}"
            for column, name in enumerate(self.reward_func_names)
        ]
        self.credit = Credit(
            kind="outcome" if no_turn_reward else credit,
            coefficient=turn_advantage_coef,
            discount=turn_discount,
            scaled=self.scale_rewards != "none",
            original=original,
        )

    # What reward functions gave; in a distributed run the workers call these, on a copy for each group

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        with _noting() as given:
            rewards: torch.Tensor = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._given = given
        self.batch_rewards = rewards
        return rewards

    def turn_rewards(self, masks: Sequence[Sequence[int]], part: slice = slice(None)) -> list[list[float]]:
        """One reward a turn of each completion that was scored last: the functions' weighted sum, NaN for none.

        Args:
            masks: of these completions, 1 for what the model wrote.
            part: which of the completions that were scored.

        Raises:
            ValueError: a function gave not as many rewards as there are turns.
        """
        weights = self.reward_weights.tolist()
        rows = [[float("nan")] * len(turn_starts(mask)) for mask in masks]
        for index, column in enumerate(self._turn_columns):
            name = self.reward_func_names[column].removeprefix("turn/")
            for row, value in zip(rows, self._given[index][part], strict=True):
                for turn, reward in enumerate(of_each_turn(value, len(row), name)):
                    if reward == reward:
                        row[turn] = weights[column] * reward + (row[turn] if row[turn] == row[turn] else 0.0)
        return rows

    def columns_of(self, part: slice, masks: Sequence[Sequence[int]]) -> dict[str, Any]:
        rows = self.turn_rewards(masks, part)
        return {
            "turn_counts": np.asarray([len(row) for row in rows], np.int32),
            "turn_rewards": np.fromiter(chain.from_iterable(rows), np.float32),
        }

    def take_rewards(self, rewards: torch.Tensor, groups: Sequence[RolloutGroup]) -> None:
        self.batch_rewards = rewards
        self._served_turns = own_share(self, [row for group in groups for row in group.rewards_of_turns()])

    # The advantages of each token

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._served_turns = None
        with _noting_masks(self) as masks:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        turns = gather_object(self.turn_rewards(masks) if self._served_turns is None else self._served_turns)
        advantages = self.token_advantages(output, turns, gather_object(masks))
        output["advantages"] = advantages.to(output["advantages"]) * output["completion_mask"]
        return output

    def token_advantages(
        self, output: dict[str, Any], turns: list[list[float]], masks: list[list[int]]
    ) -> torch.Tensor:
        """Advantages of the tokens of this process's completions, [B, T].

        Args:
            output: the batch as TRL has assembled it, [B, T]. What is added to it comes with each micro-batch.
            turns: one reward a turn, of the completions of all processes.
            masks: 1 for each token that the model wrote, of the completions of all processes.
        """
        size, width = output["completion_ids"].shape
        own = slice(self.accelerator.process_index * size, (self.accelerator.process_index + 1) * size)
        rows = [
            torch.nn.functional.pad(torch.from_numpy(per_token(mask, of_turns)), (0, width - len(mask)))
            for mask, of_turns in zip(masks[own], self._advantages(turns, masks)[own], strict=True)
        ]
        return torch.stack(rows).to(output["advantages"])

    def _advantages(self, turns: list[list[float]], masks: list[list[int]]) -> list[Any]:
        """Advantages of the turns of each completion of the batch, of all processes."""
        if self.credit.kind in ("turn", "cae") and any(np.count_nonzero(np.nan_to_num(row)) > 1 for row in turns):
            _say_that_there_are_two_levels(self.credit.kind)
        self._report(*self._outcome_and_total(self.batch_rewards), [len(row) for row in turns])
        everything = self._completions(self.batch_rewards, turns, masks)
        size = self.num_generations
        return [
            row
            for start in range(0, len(everything), size)
            for row in self.credit.advantages(everything[start : start + size])
        ]

    def teaches_nothing(self, group: RolloutGroup) -> bool:
        """Return whether all advantages of the group are 0."""
        rewards = torch.from_numpy(group.rewards)
        rows = self.credit.advantages(self._completions(rewards, group.rewards_of_turns(), group.masks()))
        return not any(row.any() for row in rows)

    def _completions(
        self, rewards: torch.Tensor, turns: list[list[float]], masks: Sequence[Sequence[int]]
    ) -> list[RewardedTurns]:
        outcome, total = self._outcome_and_total(rewards)
        return [
            RewardedTurns(outcome=one, total=of_turns, rewards=row, has_result=not all(mask))
            for one, of_turns, row, mask in zip(outcome.tolist(), total.tolist(), turns, masks, strict=True)
        ]

    def _outcome_and_total(self, rewards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """R^O and R^T of each completion."""
        weighted = rewards * self.reward_weights.to(rewards.device)
        columns = [column in self._turn_columns for column in range(rewards.shape[1])]
        is_turn = torch.tensor(columns, dtype=torch.bool, device=rewards.device)
        return _sums(weighted[:, ~is_turn]), _sums(weighted[:, is_turn])

    def _report(self, outcome: torch.Tensor, total: torch.Tensor, turns: list[int]) -> None:
        combined = _sums(torch.stack([outcome, total], dim=1))
        metrics = self._metrics["train"]
        for name, values in (("outcome", outcome), ("turn", total), ("combined", combined)):
            known = values[~values.isnan()]
            if not len(known):  # a trainer without turn rewards has no figures of them
                continue
            metrics[f"reward/{name}"].append(known.mean().item())
            metrics[f"reward_std/{name}"].append(known.std().item() if len(known) > 1 else 0.0)
        metrics["completions/turns_mean"].append(sum(turns) / len(turns))
        metrics["completions/turns_max"].append(float(max(turns)))


@cache
def _say_that_there_are_two_levels(credit: str) -> None:
    logger.warning(
        'turn reward functions reward several turns of a completion, and credit="{}" adds them up: the sum counts '
        'before the first result of a tool, and nothing of it after. credit="reward_to_go" gives each turn its own',
        credit,
    )


@contextmanager
def _noting_masks(trainer: Any) -> Iterator[list[list[int]]]:
    """While completions are made: of each, 1 for what the model wrote. TRL's later masks may hide whole completions."""
    masks: list[list[int]] = []
    own, generate = vars(trainer).get("_generate"), trainer._generate

    def noted(prompts: Any) -> Any:
        result = generate(prompts)
        masks[:] = [[1] * len(ids) for ids in result[1]] if result[2] is None else [list(mask) for mask in result[2]]
        return result

    trainer._generate = noted
    try:
        yield masks
    finally:
        del trainer._generate
        if own is not None:
            trainer._generate = own


@contextmanager
def _noting() -> Iterator[dict[int, list[Given]]]:
    """While rewards are calculated: what the turn reward functions return, by their index."""
    given: dict[int, list[Given]] = {}
    token = _given_now.set(given)
    try:
        yield given
    finally:
        _given_now.reset(token)


def _summing(index: int, function: Any) -> Callable[..., Any]:
    """The function as TRL calls it: each completion's rewards are added up, and noted one by one."""
    if not callable(function) or isinstance(function, torch.nn.Module):
        raise ValueError(
            f"turn_reward_funcs are functions, got a {type(function).__name__}. A reward model judges whole "
            "completions: put it into reward_funcs."
        )
    name = get_callable_name(function)

    def noted(values: Sequence[Any]) -> list[float | None]:
        plain = [value.tolist() if hasattr(value, "tolist") else value for value in values]  # of numpy or torch
        given = _given_now.get()
        if given is not None:
            given[index] = plain
        return [known_sum(value, name) for value in plain]

    async def summed_later(*args: Any, **kwargs: Any) -> list[float | None]:
        return noted(await function(*args, **kwargs))

    def summed(*args: Any, **kwargs: Any) -> list[float | None]:
        return noted(function(*args, **kwargs))

    summing = summed_later if is_async_callable(function) else summed
    summing.__name__ = name
    vars(summing).update(
        {says: getattr(function, says) for says in ("thread_safe", "joint") if hasattr(function, says)}
    )
    return summing


def _sums(rewards: torch.Tensor) -> torch.Tensor:
    """Over the columns that are known; NaN where none is, or there are no columns."""
    sums = rewards.nansum(dim=1)
    sums[rewards.isnan().all(dim=1)] = torch.nan
    return sums


def _refuse_free_turns(trainer: Any) -> None:
    """`recursive` needs as many turns in each completion, and only an environment can see to that."""
    factories = trainer.environment_factories or {}
    fixed = factories and all(getattr(factory, "fixed_turns", False) for factory in factories.values())
    if (trainer.tools or factories) and not fixed:
        raise ValueError(
            'credit="recursive" compares the rewards of each turn over the completions of a group, so all must have '
            "the same number of turns, and here the model decides how often it calls a tool. Take "
            'credit="reward_to_go". If the environment gives each completion the same number of turns, set '
            "fixed_turns = True on the class or function that is its environment_factory."
        )


def _refuse_other_comparisons(trainer: Any) -> None:
    if trainer.scale_rewards == "batch":
        raise ValueError(
            'scale_rewards="batch" divides by the spread of a whole batch, and the advantages of turns compare within '
            'a group. Take scale_rewards="group" or "none".'
        )
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            "multi_objective_aggregation compares each reward by itself, and the advantages of turns compare their "
            'sums. Take "sum_then_normalize".'
        )
