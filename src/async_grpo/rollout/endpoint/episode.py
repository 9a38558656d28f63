"""One episode: the requests of one call of an agent, recorded as one completion.

A request goes on from the last one: its messages begin with those and the answer. The recorded tokens stay as they were
sampled, and what is between two turns gets a mask of 0. A request that goes on from anything else would be another
sequence, and a completion has one; its group fails, because training on a part of what the agent asked would be
training on another agent.

Used on the worker's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.endpoint.chat_template import as_template
from async_grpo.rollout.endpoint.protocol import (
    Answer,
    Message,
    Request,
    RequestRefusal,
    Rules,
    no_episode,
    read_message,
)
from async_grpo.tokens.transcript import TokenLimits, Transcript

if TYPE_CHECKING:
    from async_grpo.rollout.endpoint.chat_template import Chat
    from async_grpo.tokens import Tokens

Sample = Callable[[list[int], int], Awaitable["Tokens"]]
"""Has a prompt continued, in the turn of this number."""


class Episode:
    """Answers requests, and records them.

    Args:
        index: of its completion in the group.
        number: to name it by in answers.
    """

    def __init__(
        self, chat: Chat, rules: Rules, limits: TokenLimits, sample: Sample, *, index: int, number: str
    ) -> None:
        self.rules, self.index, self.number = rules, index, number
        self.is_full = False  # it has come to its greatest length
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transcript = Transcript()
        self.messages: list[Message] = []  # the completion, as TRL has it
        self.cause = ""  # the error of another call of its group, which ends this one
        self.lost = False  # nobody waits for the newest answer any more
        self._chat, self._limits, self._sample = chat, limits, sample
        self._one_at_a_time = asyncio.Lock()
        self._asked: Request | None = None
        self._answering: asyncio.Task[Answer] | None = None
        self._history: list[Message] = []  # that the next request has to begin with
        self._tools: Sequence[Any] = ()  # of all requests
        self._active = time.monotonic()

    @property
    def idle_s(self) -> float:
        """How long nothing is sampled for it: what the agent, or a tool of its, takes."""
        sampling = self._answering is not None and not self._answering.done()
        return 0.0 if sampling else time.monotonic() - self._active

    async def answer(self, request: Request) -> Answer:
        """The answer, or the same again for a client that has lost it: another would be a second sample to choose from.

        Raises:
            RequestRefusal: with what is wrong with the request.
        """
        async with self._one_at_a_time:
            if self._answering is not None:  # the client of the one before may have gone
                await asyncio.wait([self._answering])
            if not self._is_repeated(request):
                self._asked = request
                self._answering = asyncio.create_task(self._answer(request))
                self._answering.add_done_callback(self._note)
            self.lost = False
            assert self._answering is not None
            try:
                return await asyncio.shield(self._answering)
            except asyncio.CancelledError:
                if self._answering.cancelled():
                    raise no_episode(self.cause) from None
                raise

    async def close(self) -> None:
        """Drop what is still asked."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait([self._answering])

    def refuse(self, refusal: RequestRefusal) -> None:
        """A request was refused. What the agent does without it is not what would be trained, so its group fails."""
        if refusal.ends:
            self.is_full = True
        elif not self.failed.done():
            self.failed.set_exception(UnsupportedError(f"The endpoint refused a request of the agent: {refusal}"))
            self.failed.exception()  # it is known

    def _is_repeated(self, request: Request) -> bool:
        asked = self._asked
        same = asked is not None and (asked.messages, asked.tools) == (request.messages, request.tools)
        return same and (self.lost or request.is_retry)

    def _note(self, answering: asyncio.Task[Answer]) -> None:
        self._active = time.monotonic()
        error = None if answering.cancelled() else answering.exception()
        if isinstance(error, RequestRefusal):
            self.refuse(error)
        elif error is not None and not self.failed.done():
            self.failed.set_exception(error)
            self.failed.exception()

    async def _answer(self, request: Request) -> Answer:
        before, turns = self.transcript.whole, self.transcript.turns
        read = self._read_of(request)
        prompt = before + read
        left = self._tokens_left(read)
        most = min(left, request.max_tokens or left)
        turn = (await self._sample(prompt, turns))[:most]
        ids = turn.ids
        said = self._chat.said(ids, prompt, with_tools=bool(request.tools), number=f"{self.number}_{turns}")
        self._record(request, read, turn)
        self.messages.append(said.for_template)
        self._history = [*request.messages, read_message(said.for_client)]
        ended = "tool_calls" if "tool_calls" in said.for_client else "stop"
        is_cut = len(ids) == most and not self._chat.has_ended(ids)
        texts = self._chat.texts(ids) if request.logprobs else [""] * len(ids)
        return Answer(
            message=said.for_client,
            finish_reason="length" if is_cut else ended,
            prompt_tokens=len(prompt),
            tokens=list(zip(texts, turn.logprobs, strict=True)),
        )

    def _read_of(self, request: Request) -> list[int]:
        """What the model reads before it answers: the prompt, or what is new in a later turn."""
        if not self.transcript.turns:
            return self._chat.prompt(request.messages, request.tools)
        return self._chat.after(self.messages[-1], self._new(request), self.transcript.tokens.ids[-1])

    def _new(self, request: Request) -> Sequence[Message]:
        """The messages that come after the last answer, for the template."""
        seen = len(self._history)
        for index, (message, earlier) in enumerate(zip(request.messages, self._history)):
            if not _are_alike(message, earlier):
                raise _edited(f"message {index} ({message['role']}) is not what it was in the request before")
        if len(request.messages) <= seen:
            raise _edited("it has no message behind the last answer")
        if list(request.tools) != list(self._tools):
            raise _edited("its tools are others than in the request before, and they are part of the prompt")
        return as_template(request.messages)[seen:]

    def _tokens_left(self, read: Sequence[int]) -> int:
        """Tokens that the model may still write."""
        so_far = self.transcript
        left = so_far.tokens_left(self._limits, read) if so_far.turns else Transcript(read).tokens_left(self._limits)
        if left > 0:
            return left
        if so_far.turns:
            what = f"The completion has come to max_completion_length ({self._limits.completion} tokens), or to the "
        else:
            what = "The prompt is longer than the "
        raise RequestRefusal(
            f"{what}{self._limits.sequence} tokens that the engine takes: it has {len(so_far.whole) + len(read)} "
            "before the answer.",
            code="context_length_exceeded",
            param="messages",
            ends=so_far.turns > 0,
        )

    def _record(self, request: Request, read: list[int], turn: Tokens) -> None:
        if self.transcript.turns:
            self.messages += self._new(request)
            self.transcript.read(read)
        else:
            self._tools = request.tools
            self.transcript = Transcript(read)
        self.transcript.write(turn)


def _are_alike(message: Message, earlier: Message) -> bool:
    """Equal but for white space around the text, which many agents strip; the recorded tokens keep it."""
    with suppress(KeyError):
        message, earlier = ({**each, "content": each["content"].strip()} for each in (message, earlier))
    return message == earlier


def _edited(what: str) -> RequestRefusal:
    return RequestRefusal(
        f"The request does not go on from the last one: {what}. An episode is one completion, so each request must "
        "repeat the messages of the one before and the answer to it, as they were, and add to them. What an agent "
        "drops, shortens or rewrites, and a second dialogue beside the first, cannot be trained as this completion. "
        "Keep the history, and let one agent call hold one dialogue.",
        code="history_changed",
        param="messages",
    )
