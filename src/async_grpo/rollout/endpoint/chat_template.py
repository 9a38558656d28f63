"""Token ids of messages, and messages of token ids, by the tokenizer's own chat template.

What the model has written is never tokenised again. A later prompt is what an episode has recorded, and the tokens of
what is new, as the template has it behind a message of the assistant.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trl.chat_template_utils import add_response_schema, parse_response
from trl.data_utils import prepare_multimodal_messages

from async_grpo.errors import UnsupportedError
from async_grpo.rollout.endpoint.protocol import Message, RequestRefusal

if TYPE_CHECKING:
    from trl import GRPOTrainer

_MARK = "THE-ASSISTANT-SAID-THIS"  # in the place of what the model wrote, to find its end by


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message of the model."""

    for_client: Message  # as OpenAI's API has it
    for_template: Message  # as chat templates, TRL and reward functions have it


class Chat:
    """The trainer's template and tokenizer.

    Raises:
        UnsupportedError: there is no chat template.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        trl: Any = trainer
        self._processor = trl.processing_class
        self._settings = {"chat_template": trl.chat_template, **trl.chat_template_kwargs}
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        self._end_ids = set(trl.eos_token_ids)
        self._ends = [self._tokenizer.decode([token]) for token in trl.eos_token_ids]
        if not (trl.chat_template or self._processor.chat_template):
            raise UnsupportedError(
                "OpenAIHarness needs a chat template, which makes a prompt of an agent's messages, and this tokenizer "
                "has none. Take an instruction-tuned model, or set processing_class.chat_template in the setup file."
            )
        self._parser = _with_tools(self._tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any]) -> list[int]:
        """Raises `RequestRefusal`."""
        if tools and self._parser is None:
            raise RequestRefusal(
                "The request has tools, and this tokenizer cannot say which tools a model calls: it has no "
                "response_template, and TRL knows none for its chat template. Describe the tools in a message and "
                "read the calls from the text, or set response_template.",
                code="unsupported_parameter",
                param="tools",
            )
        return self._ids(self._rendered(as_template(messages), tools=list(tools) or None))

    def after(self, said: Message, new: Sequence[Message], last_id: int) -> list[int]:
        """Return what follows the model's message, whose last token is `last_id`, up to its next one.

        Raises:
            RequestRefusal: the template shows no end of a message of the assistant.
        """
        dummy = [{"role": "user", "content": "dummy"}, {**said, "content": _MARK}]
        text = self._rendered([*dummy, *new])
        start = text.find(_MARK)
        ends = [at for end in self._ends if (at := text.find(end, start)) >= 0]
        if start < 0 or not ends:
            raise RequestRefusal(
                "The chat template does not show a message of the assistant with its end token behind it, so a later "
                "turn cannot be put behind the tokens that the model wrote. Use another chat template.",
                code="unsupported_template",
            )
        ids = self._ids(text[min(ends) :])
        return ids[1:] if last_id in self._end_ids else ids

    def said(self, ids: Sequence[int], prompt: Sequence[int], *, with_tools: bool, number: str) -> Said:
        """The message that the model wrote."""
        if with_tools and self._parser is not None:
            parsed = parse_response(self._parser, list(ids), prefix=list(prompt))
        else:
            parsed = {"role": "assistant", "content": self._tokenizer.decode(ids, skip_special_tokens=True)}
        called = parsed.get("tool_calls") or []
        calls = [_for_client(call, f"call_{number}_{index}") for index, call in enumerate(called)]
        message: Message = {"role": "assistant", "content": parsed["content"] or (None if calls else "")}
        if calls:
            message["tool_calls"] = calls
        if isinstance(thoughts := parsed.get("reasoning_content"), str):
            message["reasoning_content"] = thoughts
        return Said(for_client=message, for_template=parsed)

    def texts(self, ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.decode([token]) for token in ids]

    def text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def has_ended(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self._end_ids

    def _rendered(self, messages: Sequence[Message], tools: Any = None) -> str:
        try:
            text: str = self._processor.apply_chat_template(
                self._in_parts(messages), tools=tools, add_generation_prompt=True, tokenize=False, **self._settings
            )
        except Exception as error:  # of the template: a role or an order that it does not take
            raise RequestRefusal(
                f"The chat template refuses these messages: {type(error).__name__}: {error}",
                code="invalid_value",
                param="messages",
            ) from error
        return text

    def _in_parts(self, messages: Sequence[Message]) -> list[Message]:
        """A processor takes content in parts only."""
        is_tokenizer = self._processor is self._tokenizer
        return list(messages) if is_tokenizer else prepare_multimodal_messages(list(messages))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def as_template(messages: Sequence[Message]) -> list[Message]:
    """Messages of a request as chat templates have them: a tool's has its name, arguments are no text."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", [])}
    made = []
    for message in messages:
        own = {name: value for name, value in message.items() if name not in ("tool_call_id", "tool_calls")}
        if message["role"] == "tool":
            own["name"] = message.get("name") or names.get(message.get("tool_call_id"), "unknown")
        if calls := message.get("tool_calls"):
            own["tool_calls"] = [
                {"type": "function", "function": {**call["function"], "arguments": _arguments(call)}} for call in calls
            ]
        made.append(own)
    return made


def _arguments(call: Message) -> Any:
    text = call["function"]["arguments"]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _for_client(call: Any, number: str) -> Message:
    function = call.get("function", call)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": number, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _with_tools(tokenizer: Any) -> Any:
    """A copy that reads calls of tools; None: how its template writes them is not known."""
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return tokenizer
    try:
        return add_response_schema(copy.copy(tokenizer))
    except ValueError:
        return None
