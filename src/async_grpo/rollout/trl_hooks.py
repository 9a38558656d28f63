"""Every private name of TRL's trainer that the worker side touches, and nothing else.

`tests/integration/test_trl_contract.py` fails with the name of the hook that moved when TRL changes one of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.generator import Generator, TransformersGenerator

if TYPE_CHECKING:
    from trl import GRPOTrainer
    from trl import GRPOTrainer as UserTrainer
else:  # the user's class takes this place at run time
    UserTrainer = object

HOOKS = (
    "_generate",
    "_generate_single_turn",
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
)
_COUNTED_BY_TRL_ON_THE_TRAINER = ("completions/", "num_tokens", "reward", "frac_reward_zero_std")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedGroup:
    """The G completions of one prompt group, not scored yet, as TRL made them."""

    rows: list[dict[str, Any]]  # [G], the group's dataset row, once per completion
    prompts: list[Any]  # [G]
    completions: list[Any]  # [G], text or messages
    prompt_ids: list[list[int]]  # [G]
    completion_ids: list[list[int]]  # [G]
    logprobs: list[list[float]]  # [G]
    tool_masks: list[list[int]] | None  # [G]
    environments: list[Any] | None  # [G]
    state: Any  # what reward functions see as `trainer_state`: global_step is the version that generated
    metrics: dict[str, list[float]]  # what TRL counted while generating: tool calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the reward functions said of one group."""

    rewards: torch.Tensor  # [G, F], NaN for None
    metrics: dict[str, list[float]]  # `log_metric`
    extra_columns: dict[str, list[Any]]  # `log_extra`


class RolloutMixin(UserTrainer):
    """Put before the user's trainer class: TRL prepares prompts, runs tools and environments; tokens come from
    `generator`; scoring is left to `score()`, so that it can be done group by group."""

    generator: Generator
    _generated: tuple[Any, ...]
    _unscored: tuple[list[Any], list[Any], list[Any]]

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.generator.generate(prompt_ids)

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self._generated = super()._generate(prompts)
        return self._generated

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, *args: Any) -> torch.Tensor:
        self._unscored = (inputs, prompts, completions)
        return torch.zeros(len(prompts), len(self.reward_funcs), device=self.accelerator.device)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        return None, None, None  # the trainer's business: no forward pass here

    def generate_groups(self, rows: Sequence[dict[str, Any]], group_size: int) -> list[GeneratedGroup]:
        """Sample `group_size` completions for each row, all in one batch."""
        batch = [dict(row) for row in rows for _ in range(group_size)]
        _clear_metrics(self)
        super()._generate_and_score_completions(batch)
        metrics = _own_metrics(self)
        return [self._group(start, start + group_size, metrics) for start in range(0, len(batch), group_size)]

    def _group(self, start: int, end: int, metrics: dict[str, list[float]]) -> GeneratedGroup:
        prompt_ids, completion_ids, tool_masks, _, logprobs, *_ = self._generated
        if logprobs is None:
            raise UnsupportedError("rollout_func returned no log-probabilities ('logprobs'); they are needed here.")
        inputs, prompts, completions = self._unscored
        environments = self.environments
        return GeneratedGroup(
            rows=inputs[start:end],
            prompts=prompts[start:end],
            completions=completions[start:end],
            prompt_ids=prompt_ids[start:end],
            completion_ids=completion_ids[start:end],
            logprobs=logprobs[start:end],
            tool_masks=tool_masks[start:end] if tool_masks is not None else None,
            environments=environments[start:end] if environments is not None else None,
            state=copy.copy(self.state),
            metrics=metrics,
        )

    def score(self, group: GeneratedGroup) -> Scores:
        """Call the reward functions on one group, exactly as TRL would."""
        scorer = copy.copy(self)  # its own environments and pending logs, so that groups cannot mix
        scorer.environments = group.environments
        scorer.state = group.state
        scorer._pending_metrics = defaultdict(list)
        scorer._pending_extra_logs = defaultdict(list)
        rewards = super(RolloutMixin, scorer)._calculate_rewards(
            group.rows, group.prompts, group.completions, group.completion_ids
        )
        return Scores(
            rewards=rewards.float().cpu(),
            metrics=dict(scorer._pending_metrics),
            extra_columns=dict(scorer._pending_extra_logs),
        )


def make_rollout_trainer(trainer: GRPOTrainer) -> None:
    """Give this very trainer object a class that generates and scores, and never trains."""
    user_class = type(trainer)
    if trainer.args.use_vllm:
        raise UnsupportedError("use_vllm=True: set it to False; the workers generate with transformers, for now.")
    trainer.__class__ = type(f"Rollout{user_class.__name__}", (RolloutMixin, user_class), {})
    trainer.beta = 0.0  # no reference model: the trainer computes its log-probabilities
    trainer.ref_model = None
    model = trainer.model
    model.eval()  # no dropout while sampling
    model.training = True  # the top level only: TRL reads it as "this is a training batch"
    trainer.generator = TransformersGenerator(
        model,
        config=trainer.generation_config,
        pad_token_id=trainer._tokenizer.pad_token_id,
        eos_token_ids=trainer.eos_token_ids,
        autocast=trainer.accelerator.autocast,
    )


def _clear_metrics(trainer: Any) -> None:
    trainer._metrics["train"].clear()


def _own_metrics(trainer: Any) -> dict[str, list[float]]:
    """What TRL counted while generating that the trainer side cannot count again from the finished groups."""
    return {
        name: list(values)
        for name, values in trainer._metrics["train"].items()
        if not name.startswith(_COUNTED_BY_TRL_ON_THE_TRAINER)
    }
