"""The loop that samples tokens. `generate(custom_generate=...)` of transformers prepares everything else.

It gives the results of transformers' own loop, and differs from it in four things:

* It is stepped from outside, so that its caller can do other work between two tokens.
* A row that has ended leaves the batch, so that the longest answer is decoded alone.
* The completions of one prompt share its prefill.
* Keys and values are written into a larger buffer, instead of being copied for every token; on CUDA into one
  of fixed shapes, so that a step is one launch (`captured`).

A logits processor sees all rows, as from `generate`. One that has a method `keep(rows_b)` gets there the rows that
stay, and sees only these from then on. One that has an attribute `divergences_b` says there how far the last token's
distribution is from the one without it, in nats; None: it does not.

Shapes: B rows were asked for, b of them are still decoded; P prompt tokens, V the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    TopPLogitsWarper,
)
from transformers.cache_utils import DynamicLayer

from async_grpo.engines.captured import DecodeSteps
from async_grpo.engines.vision import VisionInputs

LEAVE_TOGETHER = 8  # rows leave the batch when one in eight has ended: making it smaller copies the cache
LOOK_EVERY_CPU = 1  # step for ended rows
LOOK_EVERY_GPU = 8  # steps: each look waits for all work that is queued
GROWTH = 64  # tokens by which a layer's buffer grows
ONE = 2**62  # probability 1 as an integer; a float32 of 2**-38 or more is exact in it, and a sum of 2 does not fit


Draw = Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""A function of logits `[b, V]`, of the scores that are sampled from (the same tensor where nothing processes them) and
of the temperature of log-probabilities. It returns tokens `[b]` and their log-probabilities `[b]`."""


class SamplingLoop:
    """Samples one continuation of each row, one token a `step`.

    Made by `generate(custom_generate=partial(SamplingLoop, ...))`, which prepares all arguments but the keywords:

    Args:
        temperature: of the log-probabilities, which are natural logs of the full softmax.
        group_sizes: numbers of neighbouring rows that belong together.
        most_tokens: of each group's rows; None: the configuration's, for all.
        draw: how tokens are sampled; None: by torch's own kernels.
        steps: passes in fixed shapes, taken where the model can; None: shapes that grow.
        vision: what the images of the prompts are computed from.
    """

    completions_BC: Tensor  # tokens sampled so far, then padding
    logprobs_BC: Tensor  # of the sampled tokens; what lies behind a row's length means nothing
    lengths_B: Tensor  # tokens sampled, the end token included
    divergences_BC: Tensor | None = None  # of the processors, as `logprobs_BC`

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        temperature: float,
        pad_token_id: int,
        group_sizes: Sequence[int],
        most_tokens: Sequence[int] | None = None,
        draw: Draw | None = None,
        steps: DecodeSteps | None = None,
        vision: VisionInputs | None = None,
        **model_kwargs: Any,
    ) -> None:
        rows, self._prompt_length = input_ids.shape
        self._position = self._prompt_length
        self._longest = int(generation_config.max_length)
        self._processors = without_float_cumsum(logits_processor, input_ids.device)
        self._criteria = stopping_criteria
        self._do_sample, self._draw = generation_config.do_sample, draw
        self._temperature, self._pad = temperature, pad_token_id
        self._look_every = LOOK_EVERY_CPU if input_ids.device.type == "cpu" else LOOK_EVERY_GPU
        self._sequences_BL = input_ids.new_full((rows, self._longest), pad_token_id)
        self._sequences_BL[:, : self._position] = input_ids
        self.completions_BC = self._sequences_BL[:, self._position :]
        self.logprobs_BC = torch.zeros(self.completions_BC.shape, dtype=torch.float32, device=input_ids.device)
        self.lengths_B = input_ids.new_zeros(rows)
        self._going_B = torch.ones(rows, dtype=torch.bool, device=input_ids.device)
        self._going = rows  # at the last look
        self._most_B = None
        if most_tokens is not None:
            self._most_B = input_ids.new_tensor(most_tokens).repeat_interleave(input_ids.new_tensor(group_sizes))
        ends = accumulate(group_sizes)
        self._open = {  # groups that have not ended, by index
            index: slice(end - size, end) for index, (size, end) in enumerate(zip(group_sizes, ends, strict=True))
        }
        self._open_rows = _OpenRows(model, input_ids, model_kwargs, vision, steps, self._longest)

    @property
    def ended(self) -> bool:
        return not self._open

    def step(self) -> dict[int, slice]:
        """Sample one token of each row; returns the groups that have ended, by index, and their rows."""
        sampled_b = self._sample()
        self._position += 1
        ended: dict[int, slice] = {}
        if self._position == self._longest:
            ended, self._open = self._open, {}
            return ended
        if self._position % self._look_every == 0 and (now := int(self._going_B.sum())) < self._going:
            self._going = now
            ended = self._close_groups()
            if self.ended:
                return ended
            sampled_b = self._open_rows.without_ended(self._going_B, sampled_b, self._processors)
        self._open_rows.step(sampled_b, self._sequences_BL[:, : self._position])
        return ended

    def _close_groups(self) -> dict[int, slice]:
        """Close the groups whose rows have all ended."""
        going = self._going_B.tolist()
        ended = {index: rows for index, rows in self._open.items() if not any(going[rows])}
        self._open = {index: rows for index, rows in self._open.items() if index not in ended}
        return ended

    def _sample(self) -> Tensor:
        """One token for each row of the batch, written where it belongs; padding for rows that have ended."""
        rows_b, column = self._open_rows.rows_b, self._position - self._prompt_length
        scores_bV = logits_bV = self._open_rows.logits_bV
        if self._processors:
            scores_bV = _processed(self._processors, self._sequences_BL[:, : self._position], self._open_rows)
            self._note_divergences(column)
        if self._do_sample and self._draw is not None:
            sampled_b, logprobs_b = self._draw(logits_bV, scores_bV, self._temperature)
        else:
            if self._do_sample:
                sampled_b = torch.multinomial(torch.softmax(scores_bV.float(), dim=-1), num_samples=1)[:, 0]
            else:
                sampled_b = scores_bV.argmax(dim=-1)
            logprobs_bV = torch.log_softmax(logits_bV.float() / self._temperature, dim=-1)
            logprobs_b = logprobs_bV.gather(1, sampled_b[:, None])[:, 0]
        self.logprobs_BC[rows_b, column] = logprobs_b
        sampled_b = torch.where(self._going_B[rows_b], sampled_b, self._pad)
        self.completions_BC[rows_b, column] = sampled_b
        self.lengths_B += self._going_B
        self._going_B &= ~self._criteria(self._sequences_BL[:, : self._position + 1], None)
        if self._most_B is not None:
            self._going_B &= self.lengths_B < self._most_B
        return sampled_b

    def _note_divergences(self, column: int) -> None:
        for processor in self._processors:
            if (divergences_b := getattr(processor, "divergences_b", None)) is not None:
                if self.divergences_BC is None:
                    self.divergences_BC = torch.zeros_like(self.logprobs_BC)
                self.divergences_BC[self._open_rows.rows_b, column] = divergences_b


class _OpenRows:
    """The rows that are still decoded, their cache, and the logits of their next token."""

    logits_bV: Tensor  # in the model's dtype

    def __init__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        vision: VisionInputs | None,
        steps: DecodeSteps | None,
        longest: int,
    ) -> None:
        self._model = model
        self._vision = vision
        self._prompt_length = input_ids.shape[1]
        fixed = steps is not None and vision is None and steps.can(model, model_kwargs)
        self._cache: Cache | None = model_kwargs.get("past_key_values", model_kwargs.get("cache_params"))
        self._mask_bL = _where_padded(model_kwargs.pop("attention_mask", None))
        self._positions_bL: Tensor | None = model_kwargs.pop("position_ids", None)  # [3, b, L] for some models
        left = vision.names if vision else ()  # only forward passes over the prompts need them
        self._kwargs = {name: value for name, value in model_kwargs.items() if name not in left}
        # A recurrent state is in layers of the cache that select no rows of it, or in the model's own modules.
        selectable = not model._is_stateful and (vision is None or self._cache is not None)
        self._can_select = (fixed or _preallocate_in(self._cache)) and selectable
        self.rows_b = torch.arange(len(input_ids), device=input_ids.device)
        self._steps: DecodeSteps | None = None
        self._prefill(input_ids)
        if fixed and steps is not None:
            self._cache, cache = None, self._kwargs.pop("past_key_values")
            steps.begin(model, cache, self._mask_bL, self._positions_bL, longest, self._kwargs)
            self._steps = steps

    def _prefill(self, input_ids: Tensor) -> None:
        """One forward pass over the prompts, each of them once."""
        firsts = copies_b = None
        if self._can_select and (self._vision is None or self._vision.selectable):
            keys = () if self._vision is None else (self._vision.keys_B[:, None],)
            prompts = torch.cat([input_ids, *(() if self._mask_bL is None else (self._mask_bL,)), *keys], dim=1)
            _, copies_b, counts = torch.unique_consecutive(prompts, dim=0, return_inverse=True, return_counts=True)
            firsts = counts.cumsum(0) - counts
            input_ids = input_ids[firsts]
            self._select(firsts)
        self._forward(input_ids, {} if self._vision is None else self._vision.of_rows(firsts), is_first_iteration=True)
        if copies_b is not None:
            self.logits_bV = self.logits_bV[copies_b]
            self._select(copies_b)

    def step(self, sampled_b: Tensor, sequences_BL: Tensor) -> None:
        """One forward pass over the tokens that were sampled last; over all of them where nothing is cached."""
        if self._steps is not None:
            self.logits_bV = self._steps.step(sampled_b)
            return
        if self._mask_bL is not None:
            self._mask_bL = torch.cat([self._mask_bL, self._mask_bL.new_ones(len(sampled_b), 1)], dim=1)
        if self._positions_bL is not None:
            last = self._positions_bL[..., -1:] + 1
            self._positions_bL = last if self._cache is not None else torch.cat([self._positions_bL, last], dim=-1)
        input_ids, images = sampled_b[:, None], {}
        if self._cache is None:
            input_ids = sequences_BL[self.rows_b]
            more_tokens = input_ids.shape[1] - self._prompt_length
            images = {} if self._vision is None else self._vision.of_rows(more_tokens=more_tokens)
        self._forward(input_ids, images, is_first_iteration=False)

    def without_ended(self, going_B: Tensor, sampled_b: Tensor, processors: LogitsProcessorList) -> Tensor:
        """Let the rows that have ended leave, if they are enough; returns the sampled tokens of those that stay."""
        going_b = going_B[self.rows_b]
        ended = len(going_b) - int(going_b.sum())
        if self._steps is not None:
            enough = self._steps.smaller_without(ended)
        else:
            enough = self._can_select and ended * LEAVE_TOGETHER >= len(going_b)
        if not enough:
            return sampled_b
        stay = going_b.nonzero()[:, 0]
        self.rows_b = self.rows_b[stay]
        self._select(stay)
        for processor in processors:
            if hasattr(processor, "keep"):
                processor.keep(stay)
        self._mask_bL = _where_padded(self._mask_bL)
        return sampled_b[stay]

    def _forward(self, input_ids: Tensor, images: dict[str, Tensor], *, is_first_iteration: bool) -> None:
        inputs = self._model.prepare_inputs_for_generation(
            input_ids,
            attention_mask=self._mask_bL,
            position_ids=self._positions_bL,
            is_first_iteration=is_first_iteration,
            **self._kwargs,
            **images,
        )
        self.logits_bV = self._model(**inputs, return_dict=True).logits[:, -1]

    def _select(self, rows: Tensor) -> None:
        """Keep these rows of everything that is computed with; a row may be there several times."""
        if self._steps is not None:
            self._steps.select(rows)
            return
        if self._mask_bL is not None:
            self._mask_bL = self._mask_bL[rows]
        if self._positions_bL is not None:
            self._positions_bL = self._positions_bL[..., rows, :]
        if self._cache is not None and self._cache.get_seq_length():
            self._cache.batch_select_indices(rows)


def _processed(processors: LogitsProcessorList, sequences_BL: Tensor, open_rows: _OpenRows) -> Tensor:
    """The scores to sample from. Processors see all B rows, as from `generate`: some keep a state for each row."""
    scores_bV, rows_b = open_rows.logits_bV.to(torch.float32, copy=True), open_rows.rows_b  # some write into them
    if len(rows_b) == len(sequences_BL):
        return processors(sequences_BL, scores_bV)
    for processor in processors:
        if hasattr(processor, "keep"):
            scores_bV = processor(sequences_BL[rows_b], scores_bV)
        else:
            scores_BV = scores_bV.new_zeros(len(sequences_BL), scores_bV.shape[1])
            scores_BV[rows_b] = scores_bV
            scores_bV = processor(sequences_BL, scores_BV)[rows_b]
    return scores_bV


def _where_padded(mask: Tensor | None) -> Tensor | None:
    """The mask, 0 where padded; None where it would hide nothing."""
    return None if mask is None or bool(mask.all()) else mask


def _preallocate_in(cache: Cache | None) -> bool:
    """Replace plain layers by `PreallocatedLayer`s before anything is cached; returns whether rows can be selected."""
    if cache is None:
        return True
    if not cache.offloading:
        cache.layers = [PreallocatedLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return all(isinstance(layer, DynamicLayer) for layer in cache.layers)


class PreallocatedLayer(DynamicLayer):
    """A `DynamicLayer` that allocates for the next tokens too, so that one token costs no copy of all before it."""

    _keys: Tensor | None = None  # [b, heads, length + GROWTH at most, head_dim]
    _values: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append `[b, heads, tokens, head_dim]`; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        self._keys, self.keys = _append(self._keys, key_states, start, end)
        self._values, self.values = _append(self._values, value_states, start, end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows; the next `update` allocates new buffers."""
        super().batch_select_indices(indices)
        self._keys, self._values = self.keys, self.values


def _append(buffer: Tensor | None, new: Tensor, start: int, end: int) -> tuple[Tensor, Tensor]:
    """The buffer, larger if it had to be, and the part of it that is in use."""
    if buffer is None or buffer.shape[-2] < end:
        larger = new.new_empty(*new.shape[:-2], end + GROWTH, new.shape[-1])
        if buffer is not None:
            larger[..., :start, :] = buffer[..., :start, :]
        buffer = larger
    buffer[..., start:end, :] = new
    return buffer, buffer[..., :end, :]


class IntegerTopP(LogitsProcessor):
    """Keep the smallest set of most probable tokens whose probabilities sum to `top_p` or more.

    The set is that of `TopPLogitsWarper`, except where its sum of floats is rounded across the limit. With
    deterministic algorithms, `torch.cumsum` of floats raises on CUDA; the sum of integers is exact in any order.
    """

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._removable = int((1 - warper.top_p) * ONE)
        self._least_kept, self._filter_value = warper.min_tokens_to_keep, warper.filter_value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores [B, V], `filter_value` for the tokens that are not kept."""
        ascending_BV, order_BV = torch.sort(scores, descending=False)
        shares_BV = (ascending_BV.softmax(dim=-1) * ONE).long()  # times a power of two: exact
        removed_BV = shares_BV.cumsum(dim=-1) <= self._removable
        removed_BV[..., -self._least_kept :] = False
        return scores.masked_fill(removed_BV.scatter(1, order_BV, removed_BV), self._filter_value)


def without_float_cumsum(processors: LogitsProcessorList, device: torch.device) -> LogitsProcessorList:
    """Return processors that may run on `device`: with `IntegerTopP` where the one of transformers would raise."""
    if device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return processors
    return LogitsProcessorList([IntegerTopP(p) if type(p) is TopPLogitsWarper else p for p in processors])
