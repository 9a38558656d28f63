"""Where tokens come from: the seam between the rollout trainer and an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel


class Generator(Protocol):
    """Samples one completion for each prompt."""

    on_step: Callable[[], None]

    def generate(self, prompt_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Returns token ids (the end token included) and their log-probabilities, for each prompt.

        The log-probabilities are natural logs of the full softmax at the sampling temperature, which is what TRL's
        trainer computes for the same tokens.
        """
        ...


class TransformersGenerator:
    """`model.generate` of transformers, with the log-probability of every sampled token.

    Args:
        config: sampling parameters, as TRL built them from the user's `GRPOConfig`.
        eos_token_ids: a completion ends with the first of these.
        autocast: the trainer's mixed precision, so that the sampler computes what the trainer would.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: GenerationConfig,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._config = config
        self._pad_token_id = pad_token_id
        self._eos_token_ids = frozenset(eos_token_ids)
        self._autocast = autocast
        self.on_step: Callable[[], None] = lambda: None  # called before each token; may raise to break off

    def generate(self, prompt_ids: Sequence[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        input_ids, attention_mask = self._left_padded(prompt_ids)
        recorder = SampledLogprobs(self._config.temperature or 1.0, self.on_step)
        with torch.no_grad(), self._autocast():
            sequences = self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=self._config,
                logits_processor=LogitsProcessorList([recorder]),
            )
        logprobs_BC = recorder.finish(sequences).cpu()
        completions_BC = sequences[:, input_ids.shape[1] :].cpu()
        completion_ids = [self._until_end(ids) for ids in completions_BC.tolist()]
        logprobs = [row[: len(ids)] for row, ids in zip(logprobs_BC.tolist(), completion_ids, strict=True)]
        return completion_ids, logprobs

    def _left_padded(self, prompt_ids: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(ids) for ids in prompt_ids)
        padded = [[self._pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompt_ids]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids]
        device = self._model.device
        return torch.tensor(padded, device=device), torch.tensor(mask, device=device)

    def _until_end(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self._eos_token_ids:
                return ids[: position + 1]
        return ids


class SampledLogprobs(LogitsProcessor):
    """Records the log-probability of each token that `generate` samples, holding one step's logits at a time.

    `generate` calls it before temperature and truncation are applied, and shows it the token that it chose only with
    the next call: so each call looks up the previous step's token.
    """

    def __init__(self, temperature: float, on_step: Callable[[], None]) -> None:
        self._temperature = temperature
        self._on_step = on_step
        self._previous_BV: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []  # each [B]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._on_step()
        self._look_up(input_ids[:, -1])
        self._previous_BV = torch.log_softmax(scores.float() / self._temperature, dim=-1)
        return scores

    def finish(self, sequences: torch.Tensor) -> torch.Tensor:
        """The log-probabilities of all sampled tokens, [B, C]; `sequences` is what `generate` returned."""
        self._look_up(sequences[:, -1])
        return torch.stack(self._columns, dim=1)

    def _look_up(self, sampled_B: torch.Tensor) -> None:
        if self._previous_BV is not None:
            self._columns.append(self._previous_BV.gather(1, sampled_B[:, None])[:, 0])
