"""Every private name of TRL's trainer that the worker side touches, and nothing else.

`tests/integration/test_trl_contract.py` fails with the name of the hook that moved when TRL changes one of them.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from async_grpo.errors import UnsupportedError
from async_grpo.records import Job, RolloutGroup, Timings
from async_grpo.rollout.engines.transformers import Generator, OnGroups, Sampled, TransformersGenerator
from async_grpo.setup.generator_choice import engine_inside, refuse_late_vllm

if TYPE_CHECKING:
    from trl import GRPOTrainer
    from trl import GRPOTrainer as UserTrainer
else:  # the class of the user takes this place at run time
    UserTrainer = object


HOOKS = (
    "_generate",
    "_generate_single_turn",
    "_tokenize_prompts",
    "_calculate_rewards",
    "_generate_and_score_completions",
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


@dataclass(frozen=True, slots=True)
class PreparedGroup:
    """A prompt as TRL would have it completed."""

    row: dict[str, Any]
    prompt_ids: list[list[int]]  # [G]


HandOver = Callable[[dict[int, GeneratedGroup]], None]


class RolloutMixin(UserTrainer):
    """Put before the user's trainer class: TRL prepares prompts, runs tools and environments; tokens come from
    `generator`; scoring is left to `score()`, so that it can be done group by group."""

    generator: Generator
    trl_generates: bool  # and no method of the user's
    _rows: Sequence[dict[str, Any]]  # of the groups that are being generated
    _hand_over: HandOver | None = None
    _preparing: bool = False
    _prepared: Sequence[PreparedGroup] = ()

    @property
    def samples_whole(self) -> bool:
        """Whether what TRL asks a generator for is always a whole completion, and asked for once."""
        return self.trl_generates and not self.tools and self.environment_factories is None and not self.rollout_func

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if self._hand_over is None or not self.samples_whole:
            return self.generator.generate(prompt_ids)
        return self.generator.generate(prompt_ids, len(prompt_ids) // len(self._rows), self._hand_over_early)

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[Any, ...]:
        if self._prepared:
            return [ids for group in self._prepared for ids in group.prompt_ids], None, {}  # images were refused
        tokenized: tuple[Any, ...] = super()._tokenize_prompts(prompts)
        if self._preparing:
            raise _Tokenized(tokenized[0])
        return tokenized

    def prepare_groups(self, rows: Sequence[dict[str, Any]], group_size: int) -> list[PreparedGroup]:
        """The first half of `generate_groups`, where the trainer `samples_whole`: up to the tokens that are wanted."""
        self._preparing = True
        try:
            self.generate_groups(rows, group_size)
        except _Tokenized as prompts:
            ids = prompts.prompt_ids
            return [PreparedGroup(row, ids[i * group_size : (i + 1) * group_size]) for i, row in enumerate(rows)]
        finally:
            self._preparing = False
        raise AssertionError("TRL made completions without tokenizing prompts")

    def finish_groups(self, prepared: Sequence[PreparedGroup], sampled: Sequence[Sampled]) -> list[GeneratedGroup]:
        """The second half: with the tokens and log-probabilities that were sampled for each group."""
        ids = [row for ids, _ in sampled for row in ids]
        self.generator = _AlreadySampled((ids, [row for _, logprobs in sampled for row in logprobs]))
        self._prepared = prepared
        try:
            return self.generate_groups([group.row for group in prepared], len(prepared[0].prompt_ids))
        finally:
            self._prepared = ()

    def _hand_over_early(self, groups: list[int], sampled: Sampled) -> None:
        """Let TRL finish these groups now, as a batch of their own; the others are still being generated."""
        assert self._hand_over is not None
        part = self.fork()
        part.generator = _AlreadySampled(sampled)
        group_size = len(sampled[0]) // len(groups)
        self._hand_over(
            dict(zip(groups, part.generate_groups([self._rows[i] for i in groups], group_size), strict=True))
        )

    def _generate(self, prompts: list[Any]) -> NoReturn:
        raise _Generated(prompts, super()._generate(prompts))

    def fork(self) -> Any:
        """A copy that generates other groups at the same time: the same settings, its own environments and counts."""
        fork = copy.copy(self)
        fork.state = copy.copy(self.state)
        fork._metrics = {mode: defaultdict(list) for mode in self._metrics}
        if self.environment_factories is not None:
            fork._environment_pool = defaultdict(list)
        return fork

    def generate_groups(
        self, rows: Sequence[dict[str, Any]], group_size: int, hand_over: HandOver | None = None
    ) -> list[GeneratedGroup]:
        """Sample `group_size` completions for each row, all in one batch.

        Args:
            hand_over: given groups, by their index, that are done while others are still being generated. All come
                back in the end, these too.
        """
        self._rows, self._hand_over = rows, hand_over
        batch = [dict(row) for row in rows for _ in range(group_size)]
        _clear_metrics(self)
        try:
            super()._generate_and_score_completions(batch)
        except _Generated as generated:
            prompts, result = generated.prompts, generated.result
            _, _, _, _, _, extra_fields, *_ = result
        else:
            raise UnsupportedError(
                f"{type(self).__name__} makes completions without GRPOTrainer._generate, so workers cannot have them. "
                "Train in one process (without --distributed), or let rollout_func make them."
            )
        metrics = _own_metrics(self)
        _merge_extra_fields(batch, extra_fields)
        ends = range(group_size, len(batch) + 1, group_size)
        return [self._group(slice(end - group_size, end), batch, prompts, result, metrics) for end in ends]

    def _group(
        self,
        part: slice,
        rows: list[dict[str, Any]],
        prompts: list[Any],
        result: tuple[Any, ...],
        metrics: dict[str, list[float]],
    ) -> GeneratedGroup:
        prompt_ids, completion_ids, tool_masks, completions, logprobs, *_ = result
        if logprobs is None:
            raise UnsupportedError("rollout_func returned no log-probabilities ('logprobs'); they are needed here.")
        environments = self.environments
        return GeneratedGroup(
            rows=rows[part],
            prompts=prompts[part],
            completions=completions[part],
            prompt_ids=prompt_ids[part],
            completion_ids=completion_ids[part],
            logprobs=logprobs[part],
            tool_masks=tool_masks[part] if tool_masks is not None else None,
            environments=environments[part] if environments is not None else None,
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


class _Tokenized(BaseException):  # no `Exception`: the user's trainer may catch those
    """Leaves TRL once it has the prompts' tokens."""

    def __init__(self, prompt_ids: list[list[int]]) -> None:
        super().__init__()
        self.prompt_ids = prompt_ids


class _Generated(BaseException):
    """Leaves TRL once it has the tokens: what it does next, padding, masks and advantages, is the training side's."""

    def __init__(self, prompts: list[Any], result: tuple[Any, ...]) -> None:
        super().__init__()
        self.prompts = prompts  # with what environments have added
        self.result = result  # of `GRPOTrainer._generate`


def _merge_extra_fields(rows: list[dict[str, Any]], fields: dict[str, Any] | None) -> None:
    """Put what `rollout_func` returned beside tokens into the rows, where reward functions find it, as TRL does."""
    for name, values in (fields or {}).items():
        for index, row in enumerate(rows):
            if not isinstance(values, list):
                row[name] = values
            elif index < len(values):
                row[name] = values[index]


class _AlreadySampled:
    """A `Generator` that gives what another one has sampled."""

    def __init__(self, sampled: Sampled) -> None:
        self.sampled = sampled
        self.on_step: Callable[[], None] = lambda: None

    def generate(
        self, prompt_ids: Sequence[list[int]], group_size: int = 1, on_groups: OnGroups | None = None
    ) -> Sampled:
        return self.sampled


def make_rollout_trainer(trainer: GRPOTrainer) -> None:
    """Give this very trainer object a class that generates and scores, and never trains."""
    from trl import GRPOTrainer as TRLTrainer

    user_class = type(trainer)
    with_engine = engine_inside(trainer.model) is not None
    if with_engine:  # Unsloth has set it; the engine is fed by us
        trainer.args.use_vllm = trainer.use_vllm = False
    else:
        refuse_late_vllm(trainer)
    trainer.trl_generates = all(
        getattr(user_class, name) is getattr(TRLTrainer, name)
        for name in ("_generate", "_generate_and_score_completions")
    )
    trainer.__class__ = type(f"Rollout{user_class.__name__}", (RolloutMixin, user_class), {})
    trainer.ref_model = None  # its log-probabilities are the training side's
    model = trainer.model
    model.eval()  # no dropout while sampling
    model.training = True  # the top level only: TRL reads it as "this is a training batch"
    if with_engine:
        return  # TRL has made no `generation_config`, and nobody generates with transformers
    trainer.generator = TransformersGenerator(
        model,
        config=trainer.generation_config,
        pad_token_id=trainer._tokenizer.pad_token_id,
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


def to_record(
    job: Job,
    generated: GeneratedGroup,
    scores: Scores,
    *,
    attempt: int,
    worker: str,
    policy_version: int,
    token_versions: list[list[int]] | None = None,
    reward_names: list[str],
    timings: Timings,
) -> RolloutGroup:
    """The finished group. Token ids as int32, log-probabilities as float32, all completions back to back."""
    masks = generated.tool_masks
    return RolloutGroup(
        job=job,
        attempt=attempt,
        worker=worker,
        policy_version=policy_version,
        reward_names=tuple(reward_names),
        prompt_ids=np.asarray(generated.prompt_ids[0], dtype=np.int32),
        completion_lengths=np.asarray([len(ids) for ids in generated.completion_ids], dtype=np.int32),
        completion_ids=_flat(generated.completion_ids, np.int32),
        sampling_logprobs=_flat(generated.logprobs, np.float32),
        tool_mask=_flat(masks, np.uint8) if masks is not None else None,
        token_versions=_flat(token_versions, np.int32) if token_versions is not None else None,
        rewards=scores.rewards.numpy().astype(np.float32),
        completions=generated.completions,
        metrics={**generated.metrics, **scores.metrics},
        extra_columns=scores.extra_columns,
        timings=timings,
    )


def _flat(rows: list[list[int]] | list[list[float]], dtype: type[np.generic]) -> np.ndarray:
    return np.fromiter(chain.from_iterable(rows), dtype=dtype)
