"""Conversations in a `rollout_func`: sampled in lockstep, continued token by token, cut where there is no room."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from async_grpo.envs import with_tags
from async_grpo.envs.conversations import Conversation, Lockstep, rollout_output
from async_grpo.errors import UnsupportedError, UserCodeExit
from kit.compared_with_trl import settings
from kit.scripted import ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer
from kit.tools import CHATML

pytestmark = pytest.mark.integration
TURN = "<|im_start|>assistant\n"


def trainer_of(tmp_path: Path, batches: list[int], tokens: int = 200, chat_template: str = CHATML) -> Any:
    """A trainer whose model numbers its messages, and that notes how many prompts it got together."""
    trainer: Any = settings(tmp_path, chat_template=chat_template, max_completion_length=tokens)()
    script = ScriptedGenerator(lambda prompt, index: f"m{prompt.count(TURN)}")

    def sample(prompt_ids: list[list[int]], *_: Any) -> Any:
        batches.append(len(prompt_ids))
        return script.generate(prompt_ids)

    trainer._generate_single_turn = sample
    return trainer


async def talk(conversation: Conversation, turns: int, wait_s: float = 0.0) -> list[str]:
    said = []
    for turn in range(turns):
        if not conversation.hear([{"role": "user", "content": f"u{turn}"}]):
            break
        said.append((await conversation.reply())["content"])
        await asyncio.sleep(wait_s)
    return said


def test_all_that_wait_are_sampled_together(tmp_path: Path) -> None:
    batches: list[int] = []
    trainer = trainer_of(tmp_path, batches)
    lockstep = Lockstep(trainer)
    conversations = [Conversation(trainer, lockstep) for _ in range(3)]
    turns = (1, 3, 2)
    said = lockstep.run([talk(each, count, 0.01 * count) for each, count in zip(conversations, turns, strict=True)])
    assert said == [["m1"], ["m1", "m2", "m3"], ["m1", "m2"]]
    assert batches == [3, 2, 1]
    second = conversations[2].transcript.tokens
    text = trainer.processing_class.decode(second.ids)
    assert text == f"m1<|im_end|>\n<|im_start|>user\nu1<|im_end|>\n{TURN}m2<|im_end|>"
    own = [token for token, mask in zip(second.ids, second.mask, strict=True) if mask]
    assert trainer.processing_class.decode(own) == "m1<|im_end|>m2<|im_end|>"
    assert second.logprobs == [-3.0 if mask else 0.0 for mask in second.mask]


def test_a_conversation_ends_where_no_room_is_left(tmp_path: Path) -> None:
    def said(tokens: int) -> tuple[list[str], str]:
        trainer = trainer_of(tmp_path, [], tokens)
        conversation = Conversation(trainer, Lockstep(trainer))
        [messages] = conversation._lockstep.run([talk(conversation, 3)])
        assert len(conversation.transcript.tokens) <= tokens
        return messages, trainer.processing_class.decode(conversation.transcript.tokens.ids)

    read = len(build_tokenizer()(f"\n<|im_start|>user\nu1<|im_end|>\n{TURN}")["input_ids"])
    assert said(3) == (["m1"], "m1<|im_end|>")
    assert said(3 + read) == (["m1"], "m1<|im_end|>"), "nothing could be said to what it would read"
    assert said(2) == (["m1"], "m1"), "cut in its first message, it hears no more"
    messages, text = said(3 + read + 2)
    assert messages == ["m1", "m2"]
    assert text.endswith(f"{TURN}m2")


@pytest.mark.parametrize(
    ("raised", "error"),
    [(SystemExit(3), UserCodeExit), (KeyboardInterrupt(), UserCodeExit), (RuntimeError(), RuntimeError)],
)
def test_an_error_of_one_episode_ends_all(raised: BaseException, error: type[Exception], tmp_path: Path) -> None:
    """Nobody is sampled for any more. A rubric or a tool of verifiers may call `exit()`."""
    batches: list[int] = []
    trainer = trainer_of(tmp_path, batches)
    lockstep = Lockstep(trainer)

    async def breaks() -> list[str]:
        raise raised

    with pytest.raises(error, match=f"{type(raised).__name__}: " if error is UserCodeExit else None):
        lockstep.run([talk(Conversation(trainer, lockstep), 3), breaks()])
    assert batches == []


def test_an_error_of_the_engine_reaches_the_caller(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])

    def fails(*_: Any) -> Any:
        raise ValueError("no tokens")

    trainer._generate_single_turn = fails
    lockstep = Lockstep(trainer)
    with pytest.raises(ValueError, match="no tokens"):
        lockstep.run([talk(Conversation(trainer, lockstep), 1) for _ in range(2)])


def test_plain_trl_tells_no_log_probabilities(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])
    sample = trainer._generate_single_turn
    trainer._generate_single_turn = lambda *arguments: (sample(*arguments)[0], None)
    conversation = Conversation(trainer, Lockstep(trainer))
    conversation._lockstep.run([talk(conversation, 2)])
    output = rollout_output([conversation])
    assert output["logprobs"] is None
    assert output["env_mask"][0].count(0) > 0


def test_tools_need_a_tokenizer_whose_calls_can_be_read(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, [])
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    conversation = Conversation(trainer, Lockstep(trainer))
    with pytest.raises(UnsupportedError, match="with_tags"):
        conversation.offer([schema])
    conversation.offer([])
    trainer.processing_class = with_tags(build_tokenizer(CHATML))
    Conversation(trainer, Lockstep(trainer)).offer([schema])
    qwen = trainer_of(tmp_path, [], chat_template=QWEN3_CHAT_TEMPLATE)
    Conversation(qwen, Lockstep(qwen)).offer([schema])
    assert qwen.processing_class.response_template is not None
