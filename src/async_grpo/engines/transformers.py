"""The engine that samples with the worker's own model, through `generate` of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine, Decoding
from async_grpo.engines.captured import DecodeSteps
from async_grpo.engines.decoding import Draw, SamplingLoop
from async_grpo.engines.policy import PolicyWeights
from async_grpo.engines.vision import VisionInputs
from async_grpo.errors import RunRefused
from async_grpo.setup.generator_choice import HF
from async_grpo.tokens import as_tokens

if TYPE_CHECKING:
    from async_grpo.setup.sampling import Guided
    from async_grpo_ipc import RemoteWeights


class TransformersEngine(BatchEngine):
    """`generate` of transformers prepares a batch, `SamplingLoop` decodes it token by token.

    Log-probabilities are natural logs of the full softmax at the loss's temperature, which is what TRL's trainer
    computes for the same tokens, whatever they were sampled with.

    Args:
        config: sampling parameters (`setup.sampling.transformers_config`).
        autocast: the trainer's mixed precision, so that the sampler computes what the trainer would.
        guidance: of the trainer, and the tokenizer that it compares.
        stopping: what ends a row besides the end token and the length.
        draw: how tokens are sampled; None: by torch's own kernels.
        steps: passes in fixed shapes; None: in shapes that grow.
        device: where the model belongs, if it was loaded without weights.
    """

    capabilities = HF

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: GenerationConfig,
        loss_temperature: float,
        pad_token_id: int,
        autocast: Callable[[], AbstractContextManager[None]],
        most_groups: int,
        guidance: Guided | None = None,
        tokenizer: Any = None,
        stopping: StoppingCriteriaList | None = None,
        draw: Draw | None = None,
        steps: DecodeSteps | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(most_groups)
        self._model, self._device = model, device
        self._config = config
        self._loss_temperature = loss_temperature
        self._pad_token_id = pad_token_id
        self._autocast = autocast
        self._guidance, self._tokenizer = guidance, tokenizer
        self._stopping = stopping or StoppingCriteriaList()
        self._draw, self._steps = draw, steps
        self._weights: RemoteWeights | None = None  # set by `follow`

    def follow(self, weights: RemoteWeights) -> PolicyWeights:
        self._weights = weights
        return PolicyWeights(weights, self._model, self._device)

    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        torch.manual_seed(groups[0].seed)
        with torch.autocast(self._model.device.type, enabled=False):  # casts of the weights are kept until its end
            if self._steps is not None and self._weights is not None:
                self._steps.of_exporter(self._weights.generation)
            loop = self._begin(groups)
            while not loop.ended:
                with torch.no_grad(), self._autocast():
                    ended = loop.step()
                yield [_completions(groups[index], loop, rows) for index, rows in ended.items()]

    def _begin(self, groups: Sequence[PreparedGroup]) -> SamplingLoop:
        """Have `generate` prepare everything up to its decoding loop, and return the loop instead of running it."""
        prompts = [torch.tensor(ids, dtype=torch.long, device="cpu") for group in groups for ids in group.prompt_ids]
        pad_left = partial(pad_sequence, batch_first=True, padding_side="left")
        input_ids = pad_left(prompts, padding_value=self._pad_token_id).to(self._model.device)
        attention_mask = pad_left([torch.ones_like(prompt) for prompt in prompts]).to(self._model.device)
        sizes = [len(group.prompt_ids) for group in groups]
        own = groups[0].job.sampling  # those of the others, but for the lengths
        lengths = [group.job.sampling.get("max_tokens", self._config.max_new_tokens) for group in groups]
        own_lengths = len({*lengths}) > 1
        if own_lengths:
            own = {**own, "max_tokens": max(lengths)}
        config = _with_own_settings(self._config, own) if own else self._config
        with_images = any(group.fields for group in groups)
        vision = VisionInputs(groups, input_ids.shape[1], input_ids.device) if with_images else None
        with_settings = partial(
            SamplingLoop,
            temperature=self._loss_temperature,
            pad_token_id=self._pad_token_id,
            group_sizes=sizes,
            most_tokens=lengths if own_lengths else None,
            draw=self._draw,
            steps=self._steps,
            vision=vision,
        )

        def prepared_loop(*args: Any, **kwargs: Any) -> partial[SamplingLoop]:
            """Begun behind `generate`, and so out of the modes that another one may have put around it."""
            return partial(with_settings, *args, **kwargs)

        with self._autocast(), torch.no_grad(), _refusing_another_generate(self._model):
            prepared = self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=config,
                custom_generate=prepared_loop,
                logits_processor=self._processors(own, config, attention_mask),
                stopping_criteria=self._stopping,
                **({} if vision is None else vision.small()),
            )
            if not isinstance(prepared, partial):
                raise TypeError(f"it returned a {type(prepared).__name__}")
            return prepared()

    def _processors(
        self, own: dict[str, Any], config: GenerationConfig, attention_mask: Tensor
    ) -> LogitsProcessorList | None:
        if self._guidance is None:
            return None
        return self._guidance.processors(
            own,
            self._model,
            self._tokenizer,
            attention_mask=attention_mask,
            temperature=config.temperature if config.do_sample else 0.0,
        )


@contextmanager
def _refusing_another_generate(model: Any) -> Iterator[None]:
    """Refuse a model whose own `generate` does not come to `SamplingLoop`; one that calls transformers' does."""
    try:
        yield
    except (TypeError, AttributeError) as error:  # it knows no `custom_generate`, or takes the loop for tokens
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if inspect.unwrap(base.generate).__module__.partition(".")[0] in ("transformers", "peft"):
            raise
        raise RunRefused(
            f"{type(base).__name__} has a generate of its own, and workers sample by the one of transformers, which "
            f"it does not call and return the result of ({type(error).__name__}: {error}). Take --generator vllm, "
            "remove it from the model, let a rollout_func of the trainer call it, or train in one process (without "
            "--distributed)."
        ) from error


def _with_own_settings(config: GenerationConfig, own: dict[str, Any]) -> GenerationConfig:
    """The trainer's settings, but for those that a job brings: see `records.OWN_SAMPLING`."""
    config = copy.deepcopy(config)
    temperature = own.get("temperature", config.temperature)
    config.do_sample, config.temperature = temperature > 0, temperature or 1.0
    for name in ("top_p", "top_k", "min_p"):
        setattr(config, name, own.get(name, getattr(config, name)))
    config.max_new_tokens = own.get("max_tokens", config.max_new_tokens)
    return config


def _completions(group: PreparedGroup, loop: SamplingLoop, rows: slice) -> SampledGroup:
    lengths = loop.lengths_B[rows].tolist()
    token_ids, logprobs = (
        [row[:length] for row, length in zip(padded_BC[rows, : max(lengths)].tolist(), lengths, strict=True)]
        for padded_BC in (loop.completions_BC, loop.logprobs_BC)
    )
    divergences: list[float] = []
    if loop.divergences_BC is not None:
        padded_GC = loop.divergences_BC[rows].tolist()
        divergences = [sum(row[:length]) for row, length in zip(padded_GC, lengths, strict=True)]
    return SampledGroup(prepared=group, tokens=as_tokens(token_ids, logprobs), divergences=divergences)
