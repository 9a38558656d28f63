"""Tool results as the chat template writes them: what TRL renders only to cut it off is rendered once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from async_grpo.rollout.turns.dialogue import ToolResults

Messages = list[dict[str, str]]


class Template:
    """Writes a message as its text's characters, after what `now` says."""

    def __init__(self) -> None:
        self.now = "12:00"
        self.rendered: list[str] = []

    def apply_chat_template(self, conversation: Sequence[Any], add_generation_prompt: bool = False) -> list[int]:
        text = self.now + "".join(message["content"] for message in conversation) + ">" * add_generation_prompt
        self.rendered.append(text)
        return list(map(ord, text))


class Trainer:
    def __init__(self) -> None:
        self.processing_class = Template()

    def _get_tool_suffix_ids(self, tool_messages: Messages) -> list[int]:
        """As TRL's: with a call before them, less what is written without them."""
        asked = [{"content": f"{tool_messages[0]['name']}?"}]
        before = self.processing_class.apply_chat_template(asked)
        whole = self.processing_class.apply_chat_template(asked + tool_messages, add_generation_prompt=True)
        if whole[: len(before)] != before:
            raise ValueError("not a prefix")
        return whole[len(before) :]


def result(name: str, content: str) -> Messages:
    return [{"name": name, "content": content}]


def text(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def test_what_stands_before_results_is_rendered_once_for_each_tool() -> None:
    trainer = Trainer()
    results = ToolResults(trainer)
    calls = [("add", "1"), ("add", "2"), ("find", "x"), ("add", "3")]
    assert [text(results.written(result(*call))) for call in calls] == ["1>", "2>", "x>", "3>"]
    rendered = trainer.processing_class.rendered
    assert [line for line in rendered if not line.endswith(">")] == ["12:00add?", "12:00find?"]
    assert len(rendered) == 2 + len(calls)


def test_a_template_may_write_the_time() -> None:
    trainer = Trainer()
    results = ToolResults(trainer)
    results.written(result("add", "1"))
    trainer.processing_class.now = "12:01"
    assert text(results.written(result("add", "2"))) == "2>"


class Extending(Trainer):
    """A user's method: it goes on writing in the list that it got, and names no argument."""

    def _get_tool_suffix_ids(self, tool_messages: Messages) -> list[int]:
        written = self.processing_class.apply_chat_template([])
        written += self.processing_class.apply_chat_template(tool_messages, *[True])
        return written


def test_a_users_method_gets_a_list_of_its_own_and_any_arguments() -> None:
    results = ToolResults(Extending())
    assert [text(results.written(result("add", content))) for content in "12"] == ["12:0012:001>", "12:0012:002>"]


def test_what_trl_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    monkeypatch.setattr(
        trainer.processing_class, "apply_chat_template", lambda messages, **options: [len(messages), len(options)]
    )
    with pytest.raises(ValueError, match="not a prefix"):
        ToolResults(trainer).written(result("add", "1"))


def test_the_users_tokenizer_stays_as_it_is() -> None:
    trainer = Trainer()
    ToolResults(trainer).written(result("add", "1"))
    assert "apply_chat_template" not in vars(trainer.processing_class)
