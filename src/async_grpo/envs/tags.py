"""Calls of tools as tags in the text, for models whose chat template knows no tools.

A message is reasoning, and then `<tool>{"name": …, "args": …}</tool>` or `<answer>…</answer>`. What the tool returned
comes back in a user's message, as `<result>…</result>`. TRL's own tool loop does the rest: `with_tags` gives a
tokenizer a chat template that writes these tags, and a parser that reads them.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from async_grpo.errors import UsageError

OPEN, CLOSE = "<tool>", "</tool>"
STOPS = (CLOSE, "</answer>")  # a message ends with the first of them
_TEMPLATE = r"""{#- calls of tools as tags -#}
{%- set tags = namespace(messages=[], after_result=false, told=not tools) -%}
{%- for message in messages -%}
{%- set text = namespace(value='') -%}
{%- if message.content is string -%}{%- set text.value = message.content -%}
{%- elif message.content -%}
{%- set text.value = message.content | selectattr('text', 'defined') | map(attribute='text') | join('') -%}{%- endif -%}
{%- if not tags.told and message.role in ('system', 'user') -%}
{%- set tags.told = true -%}
{%- set text.value = 'You can call tools. To call one, end your message with <tool>{"name": "NAME", "args": {"ARGUMENT": VALUE}}</tool>, one call a message. What it returns comes back as <result>…</result>. The tools:\n' + (tools | map('tojson') | join('\n')) + '\n\n' + text.value -%}
{%- endif -%}
{%- for call in message.tool_calls or [] if call.function -%}
{%- set text.value = text.value + '<tool>' + ({'name': call.function.name, 'args': call.function.arguments} | tojson) + '</tool>' -%}
{%- endfor -%}
{%- if message.role == 'tool' -%}
{%- set text.value = '<result>\n' + text.value + '\n</result>' -%}
{%- if tags.after_result -%}
{%- set text.value = tags.messages[-1].content + '\n' + text.value -%}{%- set tags.messages = tags.messages[:-1] -%}
{%- endif -%}{%- endif -%}
{%- set tags.after_result = message.role == 'tool' -%}
{%- set role = 'user' if message.role == 'tool' else message.role -%}
{%- set tags.messages = tags.messages + [{'role': role, 'content': text.value}] -%}
{%- endfor -%}
{%- set messages = tags.messages -%}{%- set tools = none -%}
"""  # noqa: E501


def with_tags(tokenizer: Any) -> Any:
    """Have a tokenizer write and read calls of tools as tags, whatever its chat template knows; returns it.

    Workers let a message end with `</tool>` or `</answer>`, and write the chat template's end of the message behind
    it, which is not trained on. In plain TRL the model has to end its messages itself.

    Raises:
        UsageError: it is a processor of images, or its chat template cannot hold such a dialogue.
    """
    template = getattr(tokenizer, "chat_template", None)
    if hasattr(tokenizer, "tokenizer") or not isinstance(template, str):
        raise UsageError(
            f"with_tags needs a tokenizer with one chat template, and this {type(tokenizer).__name__} is a processor "
            "of images or has no such template. Set tokenizer.chat_template first, or use the tokenizer's own form of "
            "calls."
        )
    if not template.startswith(_TEMPLATE):
        _wrap(tokenizer, template)
    tokenizer.response_template = _response_template(tokenizer)
    tokenizer.parse_response = _Reader(tokenizer)
    tokenizer.stop_tags = STOPS
    return tokenizer


def message_of(text: str) -> dict[str, Any]:
    """The message that a model wrote: its text without the call, and the call.

    What is no valid call becomes one of a type that TRL's tool loop refuses: the model reads why, and it counts as
    failed. Text behind the end of the message stays in the content, and is not read as a call.
    """
    end = min((text.index(tag) + len(tag) for tag in STOPS if tag in text), default=len(text))
    before, opened, inside = text[:end].partition(OPEN)
    if not opened:
        return {"role": "assistant", "content": text}
    call = _call(inside.removesuffix(CLOSE)) if inside.endswith(CLOSE) else _malformed(f"{CLOSE} is missing")
    return {"role": "assistant", "content": before + text[end:], "tool_calls": [call]}


def _call(inside: str) -> dict[str, Any]:
    try:
        call = json.loads(inside)
    except (ValueError, RecursionError):
        return _malformed(f"what is between {OPEN} and {CLOSE} is not valid JSON")
    if not isinstance(call, dict) or set(call) - {"name", "args"} or not isinstance(call.get("name"), str):
        return _malformed('it is not an object with "name" and "args"')
    arguments = call.get("args", {})
    if not isinstance(arguments, dict):
        return _malformed('"args" is not an object')
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _malformed(reason: str) -> dict[str, Any]:
    return {"type": f"malformed, {reason}", "name": "tool"}


class _Reader:
    """In the place of `tokenizer.parse_response`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, response: str | list[int], *_: Any, **__: Any) -> dict[str, Any]:
        text = response if isinstance(response, str) else self._tokenizer.decode(response, skip_special_tokens=True)
        return message_of(text)


def _wrap(tokenizer: Any, template: str) -> None:
    """Put the tags before the tokenizer's own template, or before TRL's form of it for training.

    TRL continues a dialogue by appending tokens, so what was written must stay as it is when messages follow.
    """
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    tokenizer.chat_template = _TEMPLATE + template
    if is_chat_template_prefix_preserving(tokenizer):
        return
    tokenizer.chat_template = template
    with contextlib.suppress(ValueError):  # TRL knows no such form of it
        template = get_training_chat_template(tokenizer) or template
    tokenizer.chat_template = _TEMPLATE + template
    if not is_chat_template_prefix_preserving(tokenizer):
        raise UsageError(
            "with_tags: this tokenizer's chat template writes a message of the assistant in another way once messages "
            "follow it, so a dialogue cannot be continued token by token. Give the tokenizer a chat template that "
            "does not (for example, one that keeps or never writes reasoning), and call with_tags after that."
        )


def _response_template(tokenizer: Any) -> dict[str, Any]:
    """What `parse_response` of transformers reads well-formed calls by, also in a checkpoint that is loaded later."""
    asked = [{"role": "user", "content": "x"}]
    without = tokenizer.apply_chat_template(asked, tokenize=False)
    anchor = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True).removeprefix(without)
    called = {"name": "{content.name}", "arguments": "{content.args}"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": anchor or without,
        "fields": {
            "tool_calls": {
                "open": OPEN,
                "close": CLOSE,
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": called},
            },
            "content": {"close": tokenizer.eos_token, "content": "text"},
        },
    }
