"""Conversations of several messages in a `rollout_func`, token by token as the model sampled them.

Each episode is a coroutine. An episode that wants a message of the model waits; once all of them wait, they get theirs
from one batch. What others say is appended as the chat template writes it, and nothing is tokenised twice.

The private names of TRL's trainer that it touches are in the table of `tests/integration/trl_hooks.py`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from async_grpo.errors import UnsupportedError, UserCodeExit
from async_grpo.tokens import Tokens, ids_and_logprobs
from async_grpo.tokens.transcript import TokenLimits, Transcript

_SAID = "said_a8f3e2b1"  # what no chat template writes
_READERS = ("response_template", "response_schema")
Message = dict[str, Any]
T = TypeVar("T")


class Lockstep:
    """Runs the episodes of a batch, and samples for all that wait at once."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._going = 0  # episodes that do something else than wait for tokens
        self._waiting: list[tuple[list[int], asyncio.Future[tuple[list[int], list[float] | None]]]] = []

    def run(self, episodes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What each returned. Raises the first error of one, and ends the others."""
        with _apart_from_a_running_loop():
            return asyncio.run(self._run(episodes))

    async def tokens(self, prompt_ids: list[int]) -> tuple[list[int], list[float] | None]:
        """A continuation of the prompt, and the log-probabilities of its tokens where the sampler tells them."""
        answer: asyncio.Future[tuple[list[int], list[float] | None]] = asyncio.get_running_loop().create_future()
        self._waiting.append((prompt_ids, answer))
        self._stops()
        return await answer

    async def _run(self, episodes: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        self._going = len(episodes)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._episode(episode)) for episode in episodes]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _episode(self, episode: Coroutine[Any, Any, T]) -> T:
        try:
            result = await episode
        except (SystemExit, KeyboardInterrupt) as error:  # of a tool or a rubric: either would end the event loop
            raise UserCodeExit(f"{type(error).__name__}: {error}") from error
        self._stops()  # one that raised never does: nothing is sampled for the others, which end with it
        return result

    def _stops(self) -> None:
        self._going -= 1
        waiting, self._waiting = [(ids, answer) for ids, answer in self._waiting if not answer.done()], []
        if self._going > 0 or not waiting:
            self._waiting = waiting
            return
        self._going = len(waiting)
        try:
            tokens, logprobs = self._trainer._generate_single_turn([ids for ids, _ in waiting], None, {}, 1)
        except Exception as error:  # noqa: BLE001  # it belongs to those that wait
            for _, answer in waiting:
                answer.set_exception(error)
            return
        for index, (_, answer) in enumerate(waiting):
            answer.set_result((list(tokens[index]), None if logprobs is None else list(logprobs[index])))


@contextmanager
def _apart_from_a_running_loop() -> Iterator[None]:
    """A notebook's cell runs in a loop, which waits for the training of plain TRL anyway: ours runs inside of it."""
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None:
            asyncio.set_event_loop(outer)  # `asyncio.run` leaves none


class Conversation:
    """One completion: what the model writes, and what it reads between."""

    def __init__(self, trainer: Any, lockstep: Lockstep) -> None:
        self._trainer, self._lockstep = trainer, lockstep
        self._tokenizer = trainer.processing_class
        self._tools: list[dict[str, Any]] = []
        self._opening: list[Message] = []
        self._cut = False  # the model has not ended its last message
        self._limits = TokenLimits(completion=trainer.max_completion_length, sequence=_longest(trainer.model.config))
        self.transcript = Transcript()
        self.has_logprobs = True  # the sampler tells them

    def offer(self, tools: Sequence[dict[str, Any]]) -> None:
        """Tell the model of tools, by their JSON schemas, before anything else."""
        tokenizer = self._tokenizer
        if tools and not any(getattr(tokenizer, name, None) for name in _READERS):
            from trl.chat_template_utils import add_response_schema

            try:
                add_response_schema(tokenizer)
            except ValueError as error:
                raise UnsupportedError(
                    "The episode has tools, and TRL cannot read the calls of this tokenizer's chat template. Give the "
                    "trainer a tokenizer that calls tools by tags: async_grpo.envs.with_tags(tokenizer)."
                ) from error
        self._tools = list(tools)

    def hear(self, messages: Sequence[Message]) -> bool:
        """Have the model read these. False: they do not fit, or its last message was cut; nothing changed."""
        if not self.transcript.turns:
            self._opening += copy.deepcopy(list(messages))
            return True
        if self._cut:
            return False
        read = self._written(messages)
        if self.transcript.tokens_left(self._limits, read) <= 0:
            return False
        self.transcript.read(read)
        return True

    async def reply(self) -> Message:
        """The model's next message."""
        if not self.transcript.turns:
            self.transcript = Transcript(self._prompt())
        asked = self.transcript.whole
        ids, logprobs = await self._lockstep.tokens(asked)
        self.has_logprobs = self.has_logprobs and logprobs is not None
        left = self._limits.completion - len(self.transcript.tokens)
        turn = Tokens(ids, logprobs or [0.0] * len(ids))[:left]
        self._cut = not turn or turn.ids[-1] not in self._trainer.eos_token_ids
        self.transcript.write(turn)
        return self._message(turn.ids, asked)

    def _prompt(self) -> list[int]:
        return list(
            self._tokenizer.apply_chat_template(
                self._opening,
                tools=self._tools or None,
                add_generation_prompt=True,
                return_dict=False,
                **self._trainer.chat_template_kwargs,
            )
        )

    def _written(self, messages: Sequence[Message]) -> list[int]:
        """What the chat template writes after a message of the model: these messages, and the start of its next."""
        said: Message = {"role": "assistant", "content": _SAID}
        if messages[0]["role"] == "tool":
            called = {"type": "function", "function": {"name": messages[0]["name"], "arguments": {}}}
            said["tool_calls"] = [called]
        dialogue = [{"role": "user", "content": "x"}, said, *messages]
        text = self._tokenizer.apply_chat_template(
            dialogue, tokenize=False, add_generation_prompt=True, **self._trainer.chat_template_kwargs
        )
        ids = self._tokenizer(text.rpartition(_SAID)[2], add_special_tokens=False)["input_ids"]
        ends = [index for index, token in enumerate(ids) if token in self._trainer.eos_token_ids]
        if not ends:
            raise UnsupportedError(
                "The chat template ends a message of the assistant with no end token of the model, so a conversation "
                "cannot be continued. Set the end token in the model's generation_config (eos_token_id)."
            )
        return list(ids[ends[0] + 1 :])

    def _message(self, ids: list[int], prefix: list[int]) -> Message:
        if ids and any(getattr(self._tokenizer, name, None) for name in _READERS):
            from trl.chat_template_utils import parse_response

            return dict(parse_response(self._tokenizer, ids, prefix=prefix))
        return {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}


def rollout_output(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """What a `rollout_func` returns of its conversations."""
    transcripts = [conversation.transcript for conversation in conversations]
    ids, logprobs = ids_and_logprobs(transcript.tokens for transcript in transcripts)
    return {
        "prompt_ids": [transcript.prompt_ids for transcript in transcripts],
        "completion_ids": ids,
        "logprobs": logprobs if all(conversation.has_logprobs for conversation in conversations) else None,
        "env_mask": [transcript.tokens.mask for transcript in transcripts],
    }


def _longest(config: Any) -> int:
    return int(getattr(config, "text_config", config).max_position_embeddings)
