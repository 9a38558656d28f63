"""Answers the cuts of a plan with transformers' own `generate`, in one process: for small models and few problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import torch

from async_grpo_experiments.algorithms.protocols import Continuations, Cut

BATCH = 512


class CutSampler:
    """Samples from a causal language model as it is, nothing truncated.

    Args:
        problems: rows of a dataset, with `prompt` and the columns that the reward reads.
        reward: a reward function of `GRPOTrainer`, for texts.
        verified: whether the reward is 1 for what is right and 0 for all else.
        processors: makes the logits processors that guide, for one batch and its attention mask.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        problems: Sequence[dict[str, Any]],
        reward: Callable[..., list[float]],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        verified: bool = False,
        processors: Callable[[torch.Tensor], Sequence[Any]] | None = None,
    ) -> None:
        self._model, self._tokenizer, self._problems, self._reward = model, tokenizer, problems, reward
        self._longest, self._temperature, self._processors = max_new_tokens, temperature, processors
        self._verified = verified
        self._prompts = [tokenizer(problem["prompt"])["input_ids"] for problem in problems]

    def answer(self, cuts: Sequence[Cut]) -> list[Continuations]:
        """Continuations in the order of the cuts, from torch's random state."""
        rows = [(index, cut) for index, cut in enumerate(cuts) for _ in range(cut.count)]
        found: list[list[tuple[int, ...]]] = [[] for _ in cuts]
        rows.sort(key=lambda row: _kind(row[1]))
        for _, alike in groupby(rows, key=lambda row: _kind(row[1])):
            of_kind = list(alike)
            for first in range(0, len(of_kind), BATCH):
                batch = of_kind[first : first + BATCH]
                for (index, _), tokens in zip(batch, self._sampled([cut for _, cut in batch]), strict=True):
                    found[index].append(tokens)
        return [self._scored(cut, tuple(tokens)) for cut, tokens in zip(cuts, found, strict=True)]

    @torch.no_grad()
    def _sampled(self, cuts: Sequence[Cut]) -> list[tuple[int, ...]]:
        texts = [[*self._prompts[cut.problem], *cut.prefix] for cut in cuts]
        padded = self._tokenizer.pad({"input_ids": texts}, padding_side="left", return_tensors="pt")
        guiding = self._processors(padded["attention_mask"]) if cuts[0].guided and self._processors else []
        found_BT = self._model.generate(
            **padded,
            max_new_tokens=self._longest - len(cuts[0].prefix),
            do_sample=not cuts[0].greedy,
            temperature=None if cuts[0].greedy else self._temperature,
            top_k=0,
            top_p=None if cuts[0].greedy else 1.0,
            logits_processor=list(guiding),
        )[:, padded["input_ids"].shape[1] :]
        return [_to_the_end(row, self._tokenizer.eos_token_id) for row in found_BT.tolist()]

    def _scored(self, cut: Cut, completions: tuple[tuple[int, ...], ...]) -> Continuations:
        problem = self._problems[cut.problem]
        texts = [self._tokenizer.decode([*cut.prefix, *own], skip_special_tokens=True) for own in completions]
        columns = {name: [value] * len(texts) for name, value in problem.items() if name != "prompt"}
        rewards = self._reward(completions=texts, prompts=[problem["prompt"]] * len(texts), **columns)
        prompt = tuple(self._prompts[cut.problem])
        correct = tuple(reward == 1 for reward in rewards) if self._verified else ()
        return Continuations(cut=cut, prompt=prompt, completions=completions, rewards=tuple(rewards), correct=correct)


def _kind(cut: Cut) -> tuple[bool, bool, int]:
    """Cuts that are decoded together have this in common."""
    return cut.greedy, cut.guided, len(cut.prefix)


def _to_the_end(tokens: list[int], end: int) -> tuple[int, ...]:
    return tuple(tokens[: tokens.index(end) + 1] if end in tokens else tokens)
