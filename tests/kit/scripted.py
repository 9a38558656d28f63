"""Models that write what a script says: as an engine in lockstep, and as one that can be joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.engines.batch_engine import BatchEngine, Decoding
from async_grpo.setup.generator_choice import STARTED_SERVER, VLLM
from async_grpo.tokens import as_tokens
from kit.tiny_trainer import build_tokenizer


class ScriptedGenerator:
    """Writes what a function of the prompt's text and its index in the batch says, instead of sampling."""

    def __init__(self, reply: Callable[[str, int], str], tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        self._tokenizer = tokenizer or build_tokenizer()
        self._reply = reply

    def generate(self, prompt_ids: Sequence[list[int]], first: int = 0) -> tuple[list[list[int]], list[list[float]]]:
        texts = [
            self._reply(self._tokenizer.decode(ids), index) + self._tokenizer.eos_token
            for index, ids in enumerate(prompt_ids, first)
        ]
        completion_ids = [self._tokenizer(text)["input_ids"] for text in texts]
        return completion_ids, [[-3.0] * len(ids) for ids in completion_ids]


class ScriptedEngine(BatchEngine):
    """Samples what a `ScriptedGenerator` writes."""

    capabilities = STARTED_SERVER

    def __init__(self, script: ScriptedGenerator) -> None:
        super().__init__(most_groups=8)
        self._script = script

    def follow(self, weights: Any) -> Any:
        raise AssertionError("nobody asks for weights")

    def _decode(self, groups: Sequence[PreparedGroup]) -> Decoding:
        completions = iter(as_tokens(*self._script.generate([ids for group in groups for ids in group.prompt_ids])))
        for group in groups:  # the index in the batch is counted over all of them, as in TRL
            yield [SampledGroup(prepared=group, tokens=[next(completions) for _ in group.prompt_ids])]


class Streaming:
    """Continues every prompt at once, by the script."""

    capabilities, most_groups = VLLM, 8

    def __init__(self, script: ScriptedGenerator) -> None:
        self._script = script

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        texts = [self._script.generate(turn.prompt_ids, turn.first_index) for turn in new]
        return [SampledGroup(prepared=turn, tokens=as_tokens(*text)) for turn, text in zip(new, texts, strict=True)]

    def follow(self, weights: Any) -> Any: ...

    def close(self) -> None: ...


class NewWeightsEachTurn(Streaming):
    """First turns are of version 4, the next of version 5; for each token two were kept of its distribution."""

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        made = super().sample(new)
        for one in made:
            for tokens in one.tokens:
                tokens.versions = [4 + one.prepared.turn] * len(tokens)
                tokens.kept = [kept(token) for token in tokens.ids]
        return made


def kept(token: int) -> bytes:
    return np.array([token, token + 1], np.int32).tobytes()


def writing(reply: Callable[[str, int], str], of: type[GRPOTrainer] = GRPOTrainer) -> type[GRPOTrainer]:
    """Plain TRL whose model writes what a script says."""

    class Writing(of):  # type: ignore[valid-type,misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return ScriptedGenerator(reply).generate(prompt_ids)

    return Writing
