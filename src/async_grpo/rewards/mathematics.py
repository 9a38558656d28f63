"""Rewards for problems whose answer is a number or a formula: GSM8K and MATH."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from async_grpo.rewards.answers import Answer, final_answer, parse
from async_grpo.rewards.deadline import with_deadline

SECONDS = 5.0  # for one comparison
MAX_CHARACTERS = 1_000  # of an answer: a longer one is wrong without being read
SUCCESS = 0.6
MATH_TRAILING = 50  # characters after the solution that MATH's reward allows


def gsm8k(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """0.6 for the right number, 0.15 for the exact form, 0.1 each for thinking and the answer's tags, 0.05 for the end.

    Args:
        answer: the dataset's column, e.g. "18", or GSM8K's own text that ends with "#### 18".
    """
    parts = [parse(completion) for completion in completions]
    return [
        round(0.6 * right + 0.15 * part.strict + 0.1 * part.thinks + 0.1 * part.tagged + 0.05 * part.ends(within=1), 6)
        for part, right in zip(parts, _right(parts, [text.rpartition("####")[2] for text in answer]), strict=True)
    ]


def math(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    r"""0.7 for an equal answer, 0.15 for the answer's tags, 0.1 for thinking, 0.05 for a short end.

    Args:
        answer: the dataset's column: the final answer in LaTeX, or a solution that has it in `\boxed{}`.
    """
    parts = [parse(completion) for completion in completions]
    return [
        round(0.7 * right + 0.15 * part.tagged + 0.1 * part.thinks + 0.05 * part.ends(within=MATH_TRAILING), 6)
        for part, right in zip(parts, _right(parts, answer), strict=True)
    ]


for _reward in (gsm8k, math):
    _reward.success_threshold = SUCCESS  # type: ignore[attr-defined]
    _reward.final_answer = final_answer  # type: ignore[attr-defined]


def _right(parts: Sequence[Answer], gold: Sequence[str]) -> list[float]:
    """1 for each right solution, 0 for the others; those that are missing or far too long are not compared."""
    asked = [
        index
        for index, part in enumerate(parts)
        if part.solution and len(part.solution) <= MAX_CHARACTERS and gold[index].strip()
    ]
    found = equal([parts[index].solution for index in asked], gold=[gold[index].strip() for index in asked])
    right = dict(zip(asked, found, strict=True))
    return [float(right.get(index) or 0.0) for index in range(len(parts))]


def _load_math_verify() -> None:
    """Import it and have it build its grammar, which takes seconds. sympy imports more for some kinds of answers."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    for text, right in (("x + 1", "$1 + x$"), ("50%", r"\{1, 2\}"), ("(1, 2)", "x < 3")):
        _equal(text, right)


@with_deadline(seconds=SECONDS, prepare=_load_math_verify)
def equal(completions: Sequence[Any], gold: Sequence[str]) -> list[float]:
    """1 for each answer that is mathematically equal to its gold answer, by math-verify.

    Its own time limit is an alarm signal, which does nothing outside of the main thread: ours is the decorator's.
    """
    return [float(_equal(text, right)) for text, right in zip(completions, gold, strict=True)]


def _equal(text: str, right: str) -> bool:
    from math_verify import parse as parsed
    from math_verify import verify

    if text.strip() == right.strip():
        return True
    found, gold = (parsed(_as_latex(one), parsing_timeout=None) for one in (text, right))
    return bool(verify(gold, found, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"
