"""Conversations in a `rollout_func`: in lockstep, token by token, cut where no room is left. Calls of tools as tags."""

from __future__ import annotations

import asyncio
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from async_grpo.envs import with_tags
from async_grpo.envs.conversations import Conversation, Lockstep, rollout_output
from async_grpo.envs.tags import STOPS
from async_grpo.errors import UnsupportedError, UserCodeExit
from kit.compared_with_trl import settings
from kit.groups import values_of
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator, writing
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, chat_rows, length
from kit.tools import CHATML

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


# --- Calls as tags, with a chat template that knows no tools -----------------------------------------------------


CALL = '<tool>{"name": "double", "args": {"number": %s}}</tool>'
SCRIPT: list[list[str]] = [  # by the completion's index, what it writes turn by turn
    [CALL % 2, CALL % 4, "<answer>eight</answer>"],
    ["<tool>double(2)</tool>", CALL % '"x"', CALL.replace("double", "absent") % 1, "<answer>none</answer>"],
    [CALL % 3 + CALL % 5 + " and so on", "<answer>6</answer> or 10"],
    ["no call, no answer"],
]


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number.
    """
    return number + number if isinstance(number, int) else int("not a number")


def reply(prompt: str, index: int) -> str:
    said = prompt.split("<|im_start|>assistant\n")[1:]
    script = SCRIPT[index if not said[0] else int(said[0][0])]
    return (f"{index}#" if not said[0] else "") + script[min(len(said) - 1, len(script) - 1)]


class Tagged(GRPOTrainer):
    def __init__(self, processing_class: Any, **arguments: Any) -> None:
        super().__init__(processing_class=with_tags(processing_class), **arguments)


class Stopping(ScriptedGenerator):
    """Ends a message behind its first tag, as the engines do."""

    def generate(self, prompt_ids: Any) -> Any:
        completions, _ = super().generate(prompt_ids)
        texts = [self._tokenizer.decode(ids) for ids in completions]
        ends = [min((t.index(tag) + len(tag) for tag in STOPS if tag in t), default=0) for t in texts]
        cut = [ids[: end or len(ids)] for ids, end in zip(completions, ends, strict=True)]
        return cut, [[-3.0] * len(ids) for ids in cut]


def tagged_trainer(tmp_path: Path) -> Any:
    return settings(
        tmp_path,
        {"tools": [double]},
        chat_template=CHATML,
        reward_funcs=[length],
        max_completion_length=600,
        max_tool_calling_iterations=4,
        max_steps=1,
        shuffle_dataset=False,
    )


def test_dialogues_by_tags_are_as_in_plain_trl(tmp_path: Path) -> None:
    """Where the model ends its messages itself."""
    get_trainer = tagged_trainer(tmp_path)
    script = ScriptedEngine(ScriptedGenerator(reply))
    groups = InProcessWorker(get_trainer(trainer_class=Tagged), script).rollouts(jobs_of(chat_rows(2)))

    plain: Any = get_trainer(trainer_class=writing(reply, Tagged))
    plain._sync_tool_dicts, plain._async_tool_dicts = [{"double": double}] * 4, [{}] * 4
    prompts = [row["prompt"] for row in chat_rows(2) for _ in range(2)]
    _, completion_ids, masks, completions, *_ = plain._generate(prompts)
    assert [message for group in groups for message in group.completions] == completions
    assert values_of(groups, "completion_ids") == [*chain.from_iterable(completion_ids)]
    assert values_of(groups, "tool_mask") == [*chain.from_iterable(masks)]
    results = [[m["content"] for m in completion if m["role"] == "tool"] for completion in completions]
    assert results[0] == ["4", "8"]
    assert "malformed, what is between <tool> and </tool> is not valid JSON" in results[1][0]
    assert "not a number" in results[1][1]
    assert "Tool absent not found." in results[1][2]
    assert results[2:] == [["6"], []], "one call a message"
    assert sum(group.metrics["tools/failure_frequency"][0] * 2 for group in groups) > 0


def test_a_message_that_a_tag_ended_is_ended_as_the_template_does_and_not_trained_on(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(CHATML)
    worker = InProcessWorker(tagged_trainer(tmp_path)(trainer_class=Tagged), ScriptedEngine(Stopping(reply)))
    groups = worker.generate(jobs_of(chat_rows(2)))
    texts, trained = [], []
    for group in groups:
        for tokens in group.tokens:
            texts.append(tokenizer.decode(tokens.ids))
            own = [token for token, mask in zip(tokens.ids, tokens.mask, strict=True) if mask]
            trained.append(tokenizer.decode(own))
    result = "<|im_end|>\n<|im_start|>user\n<result>\n%s\n</result><|im_end|>\n<|im_start|>assistant\n"
    assert texts[0] == "0#" + CALL % 2 + result % 4 + CALL % 4 + result % 8 + "<answer>eight</answer><|im_end|>"
    assert trained[0] == "0#" + CALL % 2 + CALL % 4 + "<answer>eight</answer>"
    assert texts[2] == "2#" + CALL % 3 + result % 6 + "<answer>6</answer><|im_end|>", "nothing behind the tags"
    assert trained[3] == texts[3] == "3#no call, no answer<|im_end|>", "the model's own end is trained on"
    for group in groups:
        assert all(len(tokens.logprobs) == len(tokens.ids) for tokens in group.tokens)


def test_the_last_message_stays_as_it_is_where_no_token_is_left(tmp_path: Path) -> None:
    get_trainer = tagged_trainer(tmp_path)
    tokenizer = build_tokenizer(CHATML)
    trainer = get_trainer(trainer_class=Tagged, max_completion_length=len("0#" + CALL % 2))
    worker = InProcessWorker(trainer, ScriptedEngine(Stopping(reply)))
    (group,) = worker.generate(jobs_of(chat_rows(1)))
    assert tokenizer.decode(group.completion_ids[0]) == "0#" + CALL % 2
