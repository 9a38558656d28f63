"""The user's trainer as a worker uses it: prepare prompts, finish groups, score them.

The private names of TRL's trainer that it touches are in the table of `tests/integration/trl_hooks.py`;
`test_trl_contract.py` there fails with the name that a new TRL has moved.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from traceback import extract_tb
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from transformers import TrainerState

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.errors import RunRefused, UnsupportedError
from async_grpo.images import images_in, opened
from async_grpo.records import DIVERGENCE, Job
from async_grpo.rollout.held_data import HeldData, Numberless
from async_grpo.rollout.left import leave, left
from async_grpo.rollout.threads import UserCode, let_threads_share_tokenizers
from async_grpo.rollout.trl_group import (
    GeneratedGroup,
    Scores,
    as_fields,
    divided,
    joined,
    merge_extra_fields,
    parts_of,
    prompt_of,
    refuse_unknown_sampling,
    refuse_written_images,
    rows_of,
)
from async_grpo.rollout.trl_view import ScoringContext, TrainerView, Wait
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.generator_choice import Capabilities, engine_inside, has_images, refuse_late_vllm
from async_grpo.setup.replaced import adapter, class_of_trl, replaced_by_user
from async_grpo.setup.sampling import guidance_of
from async_grpo.setup.sampling_changes import SamplingChanges
from async_grpo.telemetry.trainer_states import StateReader
from async_grpo.tokens import Tokens, as_tokens, ids_and_logprobs, unsampled

if TYPE_CHECKING:
    from trl import GRPOTrainer

    from async_grpo.engines import Fields


Images = list[list[Any] | None] | None  # of each prompt, as PIL has them
Sampled = tuple[list[list[int]], list[list[float]]]  # token ids and their log-probabilities, for each prompt


class Sample(Protocol):
    """Has one completion of each of these prompts sampled. `fields` are what the processor made of the images."""

    def __call__(self, prompt_ids: list[list[int]], images: Images = None, fields: Fields | None = None) -> Sampled: ...


@contextmanager
def _naming_what_gave_no_numbers(functions: Sequence[str]) -> Iterator[None]:
    """Name the reward functions where TRL raises, without a name, for what one of them returned."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raised_in = extract_tb(error.__traceback__)[-1].filename
        if not raised_in.endswith("trl/trainer/grpo_trainer.py") or "reward function" in str(error):
            raise
        raise TypeError(
            f"{error}. A reward function returns a list with one number, or None, for each completion; "
            f"{' or '.join(functions)} did not."
        ) from error


class RolloutTrainer:
    """Calls the user's trainer for everything but sampling and training.

    Args:
        states: what the server writes of each step, and how to wait for it; None: there is no server that trains.

    Raises:
        UnsupportedError: `use_vllm` was set after the trainer was built.
    """

    def __init__(self, trainer: GRPOTrainer, states: StateReader | None = None, wait: Wait | None = None) -> None:
        if engine_inside(trainer.model) is not None:  # Unsloth has set it; this worker feeds the engine
            trainer.args.use_vllm = trainer.use_vllm = False
        else:
            refuse_late_vllm(trainer)
        let_threads_share_tokenizers()  # prompts are encoded while rewards are computed
        trainer.model.eval()  # no dropout while sampling
        trainer.model.training = True  # the top level only: TRL reads it as "this is a training batch"
        self._of_users = replaced_by_user(trainer)  # methods of TRL's that the user's code replaces
        self._turns_of_users = "_generate_single_turn" in self._of_users
        self._prompts_of_users = "_tokenize_prompts" in self._of_users
        if self._turns_of_users:
            trainer.__class__ = _sampling_below(type(trainer), class_of_trl(trainer))
        self.trainer: Any = trainer
        self.view = TrainerView(trainer, states, wait)
        self._changes, self._config = SamplingChanges(trainer), getattr(trainer, "generation_config", None)  # as built
        self.data_has_images = has_images(trainer)
        self.tools: defaultdict[str, UserCode] = defaultdict(lambda: UserCode("the tools"))  # by name
        self._numberless, self._held = Numberless(), HeldData()
        self._is_guided = guidance_of(trainer) is not None

    @property
    def samples_whole(self) -> bool:
        """Whether TRL asks for whole completions, once: no code runs between the tokens of a group."""
        trainer = self.trainer
        return not (self.generates_itself or trainer.tools or trainer.environment_factories or trainer.rollout_func)

    @property
    def goes_by_turns(self) -> bool:
        """Whether the generation is TRL's own, with tools or environments: each completion is a dialogue of its own."""
        return not (self.generates_itself or self._overrides("_tool_call_loop") or self.trainer.rollout_func)

    @property
    def generates_itself(self) -> bool:
        """Whether the user's class overrides TRL's generation."""
        return self._overrides("_generate_single_turn", "_generate", "_generate_and_score_completions")

    def _overrides(self, *names: str) -> bool:
        return not self._of_users.isdisjoint(names)

    @property
    def pad_token_id(self) -> int:
        return int(self.trainer._tokenizer.pad_token_id)

    def sampled_by(self, engine: Capabilities, max_staleness: int | None) -> None:
        """Note what decides which settings the user's code may change while it generates."""
        self._changes.engine, self._changes.max_staleness = engine, max_staleness

    def sampling_of(self, job: Job) -> dict[str, Any]:
        """What a job is sampled with, where that is not what the setup file says.

        The user's code has the last word on what is trained on: it may compute a setting from the step of the job.
        """
        decided = () if job.purpose == "train" else job.sampling.keys()
        return {**job.sampling, **self._changes.of(self.trainer, decided)}

    def _refuse_changes(self, trainer: Any) -> None:
        """Raise `RunRefused` where the user's code has changed the sampling of other jobs than its own."""
        if changed := self._changes.of(trainer):
            raise RunRefused(
                f"Code of the setup file that runs in the workers has changed generation_config ({changed}) where "
                "completions are not made, so each worker would sample with other settings. Change it in a callback, "
                "which the server calls, or train in one process (without --distributed)."
            )

    def end_dialogues_before(self, tokens: int) -> None:
        """Let TRL end a dialogue whose next prompt would have so many tokens, the most that the engine takes.

        TRL asks its own vLLM for them, which a worker's trainer does not have, and else the model's configuration.
        """
        config = self.trainer.model.config
        config = getattr(config, "text_config", config)
        config.max_position_embeddings = min(tokens, config.max_position_embeddings)

    def prepare(self, job: Job, version: int) -> PreparedGroup:
        """Make a prompt of the job's row, as token ids, to be sampled by this policy version.

        TRL has a copy tokenized for each completion. One is enough, unless a method of the user's does it otherwise.

        Raises:
            UnsupportedError: the job sets what no engine knows, an image cannot be read, or is in the prompt of a job
                with `prefix_ids`.
        """
        if job.sampling:
            refuse_unknown_sampling(job, guided=self._is_guided)
        self._refuse_changes(self.trainer)
        row, size = opened(job.row), job.num_generations
        prompt = prompt_of(row)
        copies = size if self._prompts_of_users and not images_in(prompt) else 1
        with self.view.during(job, version, prompts=True) if self._prompts_of_users else nullcontext():
            made, images, fields = self.trainer._tokenize_prompts([copy.deepcopy(prompt) for _ in range(copies)])
        if job.prefix_ids and images is not None:
            raise UnsupportedError(f"Job {job.seq} says how its completions begin (prefix_ids), and has images.")
        prompt_ids = [[*ids, *job.prefix_ids] for ids in made]
        return PreparedGroup(
            job=job,
            version=version,
            prompt_ids=prompt_ids if copies == size else prompt_ids * size,
            row=row,
            prompt=prompt,
            images=None if images is None else [images[0]] * size,
            fields=() if images is None else (as_fields(fields),) * size,
        )

    def finish(self, sampled: SampledGroup) -> GeneratedGroup:
        """Let TRL make completions of sampled tokens: text, or messages."""
        prepared, size = sampled.prepared, sampled.prepared.job.num_generations
        prompt_ids, tokens = _with_prefix(sampled) if prepared.job.prefix_ids else (prepared.prompt_ids, sampled.tokens)
        trainer = copy.copy(self.trainer)
        counts = {mode: defaultdict[str, list[float]](list) for mode in ("train", "eval")}
        trainer.state, trainer._metrics = TrainerState(), counts  # TRL counts there what nobody reads
        trainer._tokenize_prompts = lambda prompts: (prompt_ids, prepared.images, {})
        trainer._generate_single_turn = lambda *args, **kwargs: ids_and_logprobs(tokens)
        rows, prompts = [dict(prepared.row) for _ in range(size)], [prepared.prompt] * size
        result, nothing = trainer._generate(prompts), ScoringContext()
        made = RolloutBatch(trainer, rows, prompts, result, nothing, images=self.data_has_images)
        group = made.group(prepared.job, slice(None), prepared.version, tokens)
        if not sampled.divergences:
            return group
        return replace(group, metrics={**group.metrics, DIVERGENCE: sampled.divergences})

    def score(self, groups: Sequence[GeneratedGroup]) -> list[Scores]:
        """Call the reward functions once, on whole groups of one kind, exactly as TRL would on a batch of them."""
        if len(groups) == 1:
            whole, parts = groups[0], [slice(None)]
        else:
            whole, parts = joined(groups), parts_of([len(group.rows) for group in groups])
        scorer = copy.copy(self.trainer)  # its own environments, so that calls cannot mix
        scorer.environments = whole.environments
        scorer.generation_config = self._config  # whatever the last job has brought
        with self.view.during(groups[0].job, groups[0].version, scores=True) as call:
            # This very call's: a reward function may log in threads of its own, which have no context.
            scorer._log_metric, scorer._log_completion_extra = call.log_metric, call.log_extra
            with (
                self._held.around(scorer) if self._held.calls_left > 0 else nullcontext(),
                _naming_what_gave_no_numbers(scorer.reward_func_names),
            ):
                rewards = scorer._calculate_rewards(whole.rows, whole.prompts, whole.completions, whole.completion_ids)
            self._refuse_changes(scorer)
            columns: list[dict[str, Any]] = [{} for _ in groups]
            if isinstance(scorer, Algorithm):
                masks = [[tokens.mask for tokens in group.tokens] for group in groups]
                columns = [scorer.columns_of(*each) for each in zip(parts, masks, strict=True)]
        if self._numberless.looks:
            self._numberless.saw(scorer.reward_func_names, rewards, len(groups))
        scores = Scores(
            names=scorer.reward_func_names,
            rewards=rewards.float().cpu(),
            extra_columns=dict(call.extra),
            columns=columns[0],
            **call.taken(self.view.outside),
        )
        return [scores] if len(groups) == 1 else divided(scores, parts, columns)

    def fork(self) -> RolloutTrainer:
        """A copy that generates other groups at the same time: the same settings, its own environments and counts."""
        fork = copy.copy(self)
        fork.trainer = copy.copy(self.trainer)
        if self.trainer.environment_factories is not None:
            fork.trainer.environments = None
            fork.trainer._environment_pool = defaultdict(list)
        return fork

    def generate(self, jobs: Sequence[Job], version: int, sample: Sample) -> list[GeneratedGroup]:
        """Run TRL's whole generation, with tools, environments or code of the user's between the tokens of `sample`."""
        trainer = self.trainer
        trainer.generation_config = self._config
        self._refuse_changes(trainer)
        trainer.generation_config = self._changes.config_of(jobs[0].sampling)  # its own: its code may change it
        generate = type(trainer)._generate

        def generate_and_leave(prompts: list[Any]) -> NoReturn:
            if trainer.tools:
                trainer._sync_tool_dicts = [self._where_they_can_run(tools) for tools in trainer._sync_tool_dicts]
            leave(prompts, generate(trainer, prompts))

        trainer._generate = generate_and_leave  # padding, masks and advantages are the training side's
        below = "_sampled_below" if self._turns_of_users else "_generate_single_turn"
        setattr(trainer, below, lambda *asked, **more: sample(*self.turn_asked(*asked, **more)))
        rows = [row for job in jobs for row in rows_of(job)]
        with self.view.during(jobs[0], version) as call:
            generated = left(trainer._generate_and_score_completions, rows)
        if generated is None:
            raise RunRefused(
                f"{type(trainer).__name__} makes completions without GRPOTrainer._generate, so workers cannot have "
                "them. Train in one process (without --distributed), or let rollout_func make them."
            )
        prompts, result = generated.arguments  # with what environments have added
        made = RolloutBatch(trainer, rows, prompts, result, call, self.data_has_images)
        merge_extra_fields(rows, result[5])
        parts = parts_of([job.num_generations for job in jobs])
        return [made.group(job, part, version) for job, part in zip(jobs, parts, strict=True)]

    def _where_they_can_run(self, tools: dict[str, Any]) -> dict[str, Any]:
        return {name: partial(self.tools[name].call, tool) for name, tool in tools.items()}

    def turn_asked(
        self,
        prompt_ids: list[list[int]],
        images: Images = None,
        multimodal_fields: Any = None,
        num_generations: int = 0,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], Images, Fields | None]:
        """What the engine is to continue where TRL calls `_generate_single_turn` so."""
        if images is None or not any(images):
            return prompt_ids, None, None
        fields = dict(as_fields(multimodal_fields))
        if has_tool_images:  # then TRL says by the tokens themselves which are of images
            kinds = {self.trainer._image_pad_token_id: 1, self.trainer._video_pad_token_id: 2}
            name = "mm_token_type_ids" if "image_grid_thw" in fields else "token_type_ids"
            fields[name] = [[kinds.get(token, 0) for token in ids] for ids in prompt_ids]
        return prompt_ids, images, fields


def _sampling_below(user_class: type[GRPOTrainer], of_trl: Any) -> type[GRPOTrainer]:
    """The user's class, whose `_generate_single_turn` gets the engine's tokens where it calls TRL's."""

    @adapter
    class SampledByEngine(of_trl):
        _sampled_below: Callable[..., Sampled]

        def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Sampled:
            return self._sampled_below(prompt_ids, *args, **kwargs)

    return adapter(type(user_class.__name__, (user_class, SampledByEngine), {}))


@dataclass(slots=True)
class RolloutBatch:
    """A result of `GRPOTrainer._generate`, to be divided into groups."""

    trainer: Any
    rows: list[dict[str, Any]]
    prompts: list[Any]
    result: tuple[Any, ...]
    call: ScoringContext  # in which it was made
    images: bool  # whether the training data has any; a prompt or a tool may bring some all the same

    def group(self, job: Job, part: slice, version: int, tokens: list[Tokens] | None = None) -> GeneratedGroup:
        """Args: tokens: of the group's completions, where more is known of them than TRL has."""
        prompt_ids, completion_ids, masks, completions, logprobs, _, images, *_ = self.result
        if logprobs is None:
            raise RunRefused("rollout_func returned no log-probabilities ('logprobs'); they are needed here.")
        columns = (completion_ids, logprobs) if masks is None else (completion_ids, logprobs, masks)
        tokens = tokens or as_tokens(*(column[part] for column in columns))
        environments = self.trainer.environments
        if self.images or any(images[part] if images is not None else ()):
            refuse_written_images(self.trainer.model.config, tokens)
        return GeneratedGroup(
            job=job,
            begun_by=version,
            rows=self.rows[part],
            prompts=self.prompts[part],
            completions=completions[part],
            prompt_ids=prompt_ids[part],
            tokens=tokens,
            has_masks=masks is not None or bool(job.prefix_ids),
            environments=environments[part] if environments is not None else None,
            **self.call.taken(),
        )


def _with_prefix(sampled: SampledGroup) -> tuple[list[list[int]], list[Tokens]]:
    """The prompts without the tokens that completions were to begin with, and the completions with them."""
    prefix = sampled.prepared.job.prefix_ids
    named = any(tokens.names_versions for tokens in sampled.tokens)
    given = unsampled(prefix, sampled.prepared.version) if named else unsampled(prefix)
    prompts = [ids[: -len(prefix)] for ids in sampled.prepared.prompt_ids]
    return prompts, [given + tokens for tokens in sampled.tokens]
