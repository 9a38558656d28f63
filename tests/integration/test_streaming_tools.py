"""TRL's own tool loop and environments, with several groups in flight on one engine, which the test plays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from in_process import QWEN3_CHAT_TEMPLATE, build_tokenizer, build_trainer, chat_rows, letters

from async_grpo.rollout.group_threads import GroupThreads
from async_grpo.rollout.in_flight import GroupInFlight, Turn, versions_of_tokens
from async_grpo.rollout.trl_trainer import make_rollout_trainer

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


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: one factor.
        b: the other.
    """
    return a * b


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
    make_rollout_trainer(trainer)
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    threads = GroupThreads(trainer, lambda trainer, group: None)
    for seq in range(GROUPS):
        row = dict(trainer.train_dataset[seq])
        threads.start([SimpleNamespace(job=SimpleNamespace(seq=seq, row=row, num_generations=2))], version=4)  # type: ignore[list-item]
    ended: list[GroupInFlight] = []
    first_turns: list[Turn] = []
    while len(ended) < GROUPS:
        events = threads.events(60.0)
        assert events, "nothing happened"
        for event in events:
            if isinstance(event, GroupInFlight):
                ended.append(event)
            elif event.number == 0:
                first_turns.append(event)
                if len(first_turns) == GROUPS:  # all are in flight before any gets a token
                    for turn in first_turns:
                        answer(turn, tokenizer, [CALLS[kind], "no tool"], version=4)
            else:
                answer(event, tokenizer, ["done"], version=5)
    for group in ended:
        assert group.error is None, group.traceback
        assert group.group is not None
        roles = [[message["role"] for message in completion] for completion in group.group.completions]
        assert roles == [["assistant", "tool", "assistant"], ["assistant"]]
        assert group.group.completions[0][1]["content"] == ("12" if kind == "tools" else "3")
        versions = versions_of_tokens(group.group, group.turns, group.oldest_version())
        assert [len(row) for row in versions] == [len(ids) for ids in group.group.completion_ids]
        assert versions[0][-1] == 5, "the last turn was sampled by newer weights"
        assert set(versions[1]) == {4}


def answer(turn: Turn, tokenizer: Any, texts: list[str], version: int) -> None:
    assert len(texts) == len(turn.prompt_ids)
    for place, text in enumerate(texts):
        ids = tokenizer(text + tokenizer.eos_token)["input_ids"]
        turn.add(place, ids, [-1.0] * len(ids), version, finished=True)
