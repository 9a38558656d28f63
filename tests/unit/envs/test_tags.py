"""Calls of tools as tags: what is read of a message, and what a chat template without tools writes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.engines import stop_tags
from async_grpo.envs import SearchEnv, with_tags
from async_grpo.envs.conversations import Lockstep
from async_grpo.envs.tags import message_of
from async_grpo.errors import UsageError
from async_grpo.rewards import questions
from kit.tiny_trainer import build_tokenizer
from kit.tools import CHATML

THOUGHT = "<reasoning>I look.</reasoning>"
CALL = '<tool>{"name": "search", "args": {"query": "x"}}</tool>'
NO_CALLS = ['["search"]', '{"args": {}}', '{"name": 7, "args": {}}', '{"name": "search", "arguments": {}}']
WANTED = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}


def test_a_call_is_read_and_the_rest_is_the_content() -> None:
    assert message_of(THOUGHT + CALL) == {"role": "assistant", "content": THOUGHT, "tool_calls": [WANTED]}
    without_arguments = message_of('<tool> {"name": "now"} </tool>')["tool_calls"]
    assert without_arguments == [{"type": "function", "function": {"name": "now", "arguments": {}}}]
    answer = THOUGHT + "<answer>4</answer>"
    assert message_of(answer) == {"role": "assistant", "content": answer}


def test_a_message_ends_with_its_first_call_or_answer() -> None:
    two = message_of(THOUGHT + CALL + CALL.replace("search", "other"))
    assert two["tool_calls"] == [WANTED]
    assert two["content"].startswith(THOUGHT + "<tool>"), "which costs it the reward for its format"
    assert message_of(CALL + " and so on") == {"role": "assistant", "content": " and so on", "tool_calls": [WANTED]}
    assert "tool_calls" not in message_of("<answer>4</answer>" + CALL)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('<tool>{"name": "search", "args": {"query": "x"}}', "</tool> is missing"),
        *((f"<tool>{text}</tool>", "not valid JSON") for text in ("search(x)", "[" * 100_000, "")),
        (f"<tool>{CALL}", "not valid JSON"),
        *((f"<tool>{text}</tool>", 'not an object with "name" and "args"') for text in NO_CALLS),
        ('<tool>{"name": "search", "args": ["x"]}</tool>', '"args" is not an object'),
        ('<tool>{"name": "search", "args": null}</tool>', '"args" is not an object'),
    ],
)
def test_what_is_no_valid_call_is_one_that_fails_with_its_reason(text: str, reason: str) -> None:
    [call] = message_of(THOUGHT + text)["tool_calls"]
    assert call["type"].startswith("malformed, ") and reason in call["type"] and "function" not in call


def test_a_template_that_knows_no_tools_tells_of_them_and_shows_results() -> None:
    given = with_tags(build_tokenizer(CHATML))
    dialogue = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": THOUGHT, "tool_calls": [WANTED]},
        {"role": "tool", "name": "search", "content": "A"},
        {"role": "tool", "name": "search", "content": [{"type": "text", "text": "B"}]},
    ]
    text = given.apply_chat_template(dialogue, tools=[SearchEnv().search], tokenize=False, add_generation_prompt=True)
    told, _, rest = text.partition("Who?")
    assert told.startswith("<|im_start|>user\nYou can call tools.")
    assert '"name": "search"' in told
    assert rest == (
        f"<|im_end|>\n<|im_start|>assistant\n{THOUGHT}{CALL}<|im_end|>\n"
        "<|im_start|>user\n<result>\nA\n</result>\n<result>\nB\n</result><|im_end|>\n<|im_start|>assistant\n"
    )
    assert given.apply_chat_template(dialogue[:1], tokenize=False) == "<|im_start|>user\nWho?<|im_end|>\n"
    template = given.chat_template
    assert with_tags(given).chat_template == template, "not wrapped twice"


def test_the_tokenizer_reads_calls_and_so_does_its_saved_form() -> None:
    given = with_tags(build_tokenizer(CHATML))
    ids = given(THOUGHT + CALL + "<|im_end|>")["input_ids"]
    wanted = message_of(THOUGHT + CALL)
    assert given.parse_response(ids, prefix=[]) == wanted
    assert type(given).parse_response(given, ids, prefix=[]) == wanted, "by its response_template, which is saved"


def test_what_cannot_hold_such_a_dialogue_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no such template.*Set tokenizer.chat_template"):
        with_tags(build_tokenizer(None))
    with pytest.raises(UsageError, match="processor of images"):
        with_tags(SimpleNamespace(tokenizer=build_tokenizer(), chat_template=CHATML))
    forgets = CHATML.replace("m['content']", "(m['content'] if loop.last else '…')")
    with pytest.raises(UsageError, match="in another way once messages follow"):
        with_tags(build_tokenizer(forgets))


def test_messages_stop_at_tags_only_where_tools_are_called() -> None:
    trainer: Any = SimpleNamespace(processing_class=with_tags(build_tokenizer(CHATML)), tools=[print])
    assert stop_tags(trainer) == ("</tool>", "</answer>")
    trainer.tools = []
    assert stop_tags(trainer) == ()


def test_the_format_of_a_malformed_call_is_no_call() -> None:
    def of(text: str) -> tuple[float, float]:
        completion = [message_of(text)]
        return questions.format_of_messages([completion])[0], questions.tags([completion])[0]

    assert of(THOUGHT + CALL) == pytest.approx((0.2, 0.2))
    assert of(THOUGHT + CALL + " more")[0] < 0.2
    assert of(THOUGHT + "<tool>{}</tool>")[0] < 0.2
    assert of(THOUGHT + "<tool>{}</tool>")[1] == pytest.approx(0.1)


# --- The episodes of a batch, run together: ----------------------------------------------------------------------


class Trainer:
    """Continues each prompt by one token."""

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
        return [[len(prompt)] for prompt in prompts], None


def answers() -> list[list[int]]:
    lockstep = Lockstep(Trainer())

    async def episode(prompt: list[int]) -> list[int]:
        first, _ = await lockstep.tokens(prompt)
        second, _ = await lockstep.tokens([*prompt, *first])
        return first + second

    return lockstep.run([episode([7]), episode([7, 8])])


def test_in_a_running_loop_they_run_too_and_it_goes_on() -> None:
    async def cell() -> list[list[int]]:
        inner = answers()
        assert asyncio.get_running_loop() is asyncio.get_event_loop()
        await asyncio.sleep(0)
        return inner

    assert asyncio.run(cell()) == answers() == [[1, 2], [2, 3]]


def test_an_episode_that_raises_leaves_the_loop_outside_as_it_was() -> None:
    async def fails() -> None:
        raise LookupError("no such tool")

    async def cell() -> None:
        with pytest.raises(LookupError, match="no such tool"):
            Lockstep(Trainer()).run([fails()])
        await asyncio.sleep(0)

    asyncio.run(cell())
