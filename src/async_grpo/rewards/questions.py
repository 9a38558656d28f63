"""Rewards for questions that are answered by searching, of turns and of the outcome, as MT-GRPO has them.

A message is `<reasoning>…</reasoning>` and then a call of a tool, in the tokenizer's own form, or `<answer>…</answer>`.
The dataset's column `aliases` has the answers that count. Sums: turns at most .7, outcome at most 1.9.

Zeng et al., arXiv 2505.11821. What its code pays by mistake is closed: an empty text earns nothing, an answer must
contain a whole alias of three characters or more and be no longer than twice it, and what a failed call returned is no
result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_FAILED = ("Error:", "{'error':")  # how the texts of failed calls begin: an environment's, and TRL's
_OPENING = re.compile("<(reasoning|answer)>")
LEAST_ALIAS = 3  # characters

Completion = Sequence[dict[str, Any]]


# Of turns


def tool_execution(completions: Sequence[Completion], **_: Any) -> list[float]:
    """.2 times the share of calls that returned a result."""
    return [0.2 * _mean([not failed(result) for result in results_of(completion)]) for completion in completions]


def answer_in_results(completions: Sequence[Completion], aliases: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """.5 where a result has the answer."""
    return [
        0.5 * any(_contains(result, own, at_most=None) for result in results_of(completion) if not failed(result))
        for completion, own in zip(completions, aliases, strict=True)
    ]


# Of the outcome


def exact_match(completions: Sequence[Completion], aliases: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """1 where the answer is one of the aliases, as TriviaQA's own evaluation compares them."""
    return [
        float(bool(given := normalised(answer_of(completion))) and given in set(map(normalised, own)))
        for completion, own in zip(completions, aliases, strict=True)
    ]


def contained(completions: Sequence[Completion], aliases: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """.5 where an alias is in the answer, which is no longer than twice the alias."""
    return [
        0.5 * _contains(answer_of(completion), own, at_most=2)
        for completion, own in zip(completions, aliases, strict=True)
    ]


def format_of_messages(completions: Sequence[Completion], **_: Any) -> list[float]:
    """.2 times the mean over messages: .4 for both fields, .2 each for the spacing, the start and the end."""
    return [0.2 * _mean([_format(message) for message in _messages(completion)]) for completion in completions]


def tags(completions: Sequence[Completion], **_: Any) -> list[float]:
    """.2 times the share of tags that occur exactly once in a message that should have them, the mean over messages."""
    return [0.2 * _mean([_tags(message) for message in _messages(completion)]) for completion in completions]


TURN_REWARDS = (tool_execution, answer_in_results)
OUTCOME_REWARDS = (exact_match, contained, format_of_messages, tags)


# Parts of a completion


def answer_of(completion: Completion) -> str:
    """What the last message answers; empty where it answers nothing."""
    messages = _messages(completion)
    found = [text for name, text in _fields(_text(messages[-1]))[0] if name == "answer"] if messages else []
    return found[-1].strip() if found else ""


def results_of(completion: Completion) -> list[str]:
    """What tools returned, failures as well."""
    return [_text(message) for message in completion if message.get("role") == "tool"]


def failed(result: str) -> bool:
    return result.startswith(_FAILED)


def normalised(text: str) -> str:
    """As `normalize_answer` of TriviaQA's evaluation: lower case, no punctuation, no articles, single spaces."""
    text = text.lower().replace("_", " ").translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _contains(text: str, aliases: Sequence[str], *, at_most: int | None) -> bool:
    given = f" {normalised(text)} "
    for alias in map(normalised, aliases):
        fits = at_most is None or len(given) - 2 <= at_most * len(alias)
        if len(alias) >= LEAST_ALIAS and fits and f" {alias} " in given:
            return True
    return False


def _messages(completion: Completion) -> list[dict[str, Any]]:
    return [message for message in completion if message.get("role") == "assistant"]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _format(message: dict[str, Any]) -> float:
    text, calls = _text(message).strip(), _calls(message)
    fields, around = _fields(text)
    names = [name for name, inside in fields if inside.strip()]
    if not names and not (calls and text):
        return 0.0
    both = (("reasoning" in names) + (calls or "answer" in names)) / 2
    spaced = not around.strip()
    begins = text.startswith("<reasoning>")
    ends = text.endswith("</reasoning>") if calls else text.endswith("</answer>")
    return 0.4 * both + 0.2 * spaced + 0.2 * begins + 0.2 * ends


def _fields(text: str) -> tuple[list[tuple[str, str]], str]:
    """Name and inside of each field, and the text around them. A pattern takes time with the square of the length."""
    last_end = {name: text.rfind(f"</{name}>") for name in ("reasoning", "answer")}
    found, around, behind = [], [], 0
    for opening in _OPENING.finditer(text):
        name, start = opening[1], opening.end()
        if behind <= opening.start() and start <= last_end[name]:
            end = text.index(f"</{name}>", start)
            found.append((name, text[start:end]))
            around.append(text[behind : opening.start()])
            behind = end + len(f"</{name}>")
    return found, "".join([*around, text[behind:]])


def _tags(message: dict[str, Any]) -> float:
    text = _text(message)
    wanted = ["<reasoning>", "</reasoning>"] + ([] if _calls(message) else ["<answer>", "</answer>"])
    return sum(text.count(tag) == 1 for tag in wanted) / len(wanted)


def _calls(message: dict[str, Any]) -> bool:
    """Whether it calls a tool in a form that can be read."""
    return any(call.get("type") == "function" for call in message.get("tool_calls") or [])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
