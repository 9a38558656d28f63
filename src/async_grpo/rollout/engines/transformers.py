"""Where tokens come from: the seam between the rollout trainer and an inference engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from async_grpo.rollout.engines.decoding import SamplingLoop

Sampled = tuple[list[list[int]], list[list[float]]]  # token ids and log-probabilities, for each prompt
OnGroups = Callable[[list[int], Sampled], None]  # indices of groups, and what was sampled for all their prompts


class Generator(Protocol):
    """Samples one completion for each prompt."""

    on_step: Callable[[], None]

    def generate(
        self, prompt_ids: Sequence[list[int]], group_size: int = 1, on_groups: OnGroups | None = None
    ) -> Sampled:
        """Returns token ids (the end token included) and their log-probabilities, for each prompt.

        The log-probabilities are natural logs of the full softmax at the sampling temperature, which is what TRL's
        trainer computes for the same tokens.

        Args:
            group_size: so many neighbours belong together.
            on_groups: given the groups that are done while others go on; all come back in the end, these too.
        """
        ...


class TransformersGenerator:
    """`model.generate` of transformers with our loop, which keeps the log-probability of every sampled token.

    Args:
        config: sampling parameters, as TRL built them from the user's `GRPOConfig`.
        autocast: the trainer's mixed precision, so that the sampler computes what the trainer would.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        config: GenerationConfig,
        pad_token_id: int,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._model = model
        self._config = config
        self._pad_token_id = pad_token_id
        self._autocast = autocast
        self.on_step: Callable[[], None] = lambda: None  # called before each token; may raise to break off

    def generate(
        self, prompt_ids: Sequence[list[int]], group_size: int = 1, on_groups: OnGroups | None = None
    ) -> Sampled:
        input_ids, attention_mask = self._left_padded(prompt_ids)

        def sampled(rows: list[int]) -> Sampled:
            lengths = loop.lengths_B[rows].tolist()
            completions_bC = loop.sequences_BL[rows, input_ids.shape[1] :][:, : max(lengths)]
            return _cut(completions_bC, lengths), _cut(loop.logprobs_BC[rows, : max(lengths)], lengths)

        def tell(groups: list[int]) -> None:
            if on_groups is not None:
                rows = [row for group in groups for row in range(group * group_size, (group + 1) * group_size)]
                on_groups(groups, sampled(rows))

        loop = SamplingLoop(
            temperature=self._config.temperature or 1.0,
            pad_token_id=self._pad_token_id,
            on_step=self.on_step,
            group_size=group_size,
            on_groups=tell,
        )
        with torch.no_grad(), self._autocast():
            self._model.generate(
                input_ids=input_ids,
                attention_mask=attention_mask,
                generation_config=self._config,
                custom_generate=loop,
            )
        return sampled(list(range(len(prompt_ids))))

    def _left_padded(self, prompt_ids: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(len(ids) for ids in prompt_ids)
        padded = [[self._pad_token_id] * (longest - len(ids)) + list(ids) for ids in prompt_ids]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompt_ids]
        device = self._model.device
        return torch.tensor(padded, device=device), torch.tensor(mask, device=device)


def _cut(padded_BC: torch.Tensor, lengths: Sequence[int]) -> list[list[Any]]:
    return [row[:length] for row, length in zip(padded_BC.tolist(), lengths, strict=True)]
