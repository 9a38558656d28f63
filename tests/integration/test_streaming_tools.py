"""TRL's own tool loop and environments, with several groups in flight on one engine, which the test plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.setup.generator_choice import VLLM
from async_grpo.tokens import Tokens
from kit.in_process import InProcessWorker, jobs_of
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, build_trainer, chat_rows, letters
from kit.tools import multiply

pytestmark = pytest.mark.integration
GROUPS = 3


class Adder:
    """An environment: adds up what the model tells it to."""

    def reset(self, **row: Any) -> str:
        self.total = 0
        return ""

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what to add.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


CALLS = {
    "tools": '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>',
    "environments": '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>',
}
GIVEN = {"tools": {"tools": [multiply]}, "environments": {"environment_factory": Adder}}


@pytest.mark.parametrize("kind", ["tools", "environments"])
def test_groups_with_tools_are_in_flight_together(kind: str, tmp_path: Path) -> None:
    trainer = build_trainer(
        tmp_path,
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        arguments=dict(GIVEN[kind]),
        reward_funcs=[letters],
        max_completion_length=300,
    )
    engine = Played(build_tokenizer(QWEN3_CHAT_TEMPLATE), CALLS[kind])
    worker = InProcessWorker(trainer, engine)
    rows = list(trainer.train_dataset)[:GROUPS]
    groups = worker.generate(jobs_of(rows, group_size=2), version=4)
    assert engine.most == GROUPS * 2, "all dialogues were in flight before any got a token"
    for group in groups:
        roles = [[message["role"] for message in completion] for completion in group.completions]
        assert roles == [["assistant", "tool", "assistant"], ["assistant"]]
        assert group.completions[0][1]["content"] == ("12" if kind == "tools" else "3")
        for tokens in group.tokens:
            assert len(tokens.versions) == len(tokens)
            assert tokens.kept == [
                kept(token) if own else b"" for token, own in zip(tokens.ids, tokens.mask, strict=True)
            ]
        assert group.tokens[0].versions[-1] == 5, "the last turn was sampled by newer weights"
        assert set(group.tokens[1].versions) == {4}
        assert group.version == 4
        rewards = worker.trl.score([group])[0].rewards
        if kind == "environments":
            assert rewards[:, 1].tolist() == [3.0, 0.0], "each group's rewards are of its own environments"


def kept(token: int) -> bytes:
    """What truncated sampling kept beside this token."""
    return np.array([token, token + 1], np.int32).tobytes()


class Played:
    """Answers first turns with a call in the first one, as version 4, and later turns as version 5."""

    capabilities, most_groups = VLLM, GROUPS

    def __init__(self, tokenizer: Any, call: str) -> None:
        self._tokenizer = tokenizer
        self._answers = [[call, "no tool"], ["done"]]
        self._first: list[PreparedGroup] = []
        self.most = 0

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self._first += [turn for turn in new if turn.turn == 0]
        ended = [self._answer(turn) for turn in new if turn.turn]
        if len(self._first) == GROUPS * 2:
            self.most = len(self._first)
            ended += [self._answer(turn) for turn in self._first]
            self._first = []
        return ended

    def follow(self, weights: Any) -> Any: ...

    def close(self) -> None: ...

    def _answer(self, turn: PreparedGroup) -> SampledGroup:
        assert len(turn.prompt_ids) == 1
        ids = self._tokenizer(self._answers[turn.turn][turn.first_index] + self._tokenizer.eos_token)["input_ids"]
        return SampledGroup(
            prepared=turn,
            tokens=[
                Tokens(ids, [-1.0] * len(ids), versions=[4 + turn.turn] * len(ids), kept=[kept(token) for token in ids])
            ],
        )
