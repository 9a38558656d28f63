"""Rewards for problems whose answer is a number or a formula: GSM8K and MATH."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from async_grpo.rewards.answers import final_answer, last_number, parse
from async_grpo.rewards.deadline import with_deadline
from async_grpo.rewards.wording import one_number

SECONDS = 5.0  # for one comparison
MAX_CHARACTERS = 1_000  # of an answer: a longer one is wrong without being read
MAX_FORMULA = 100  # characters of an answer to GSM8K that has to be computed
_POWERS = re.compile(r"(?:\^|\*\*)\W*(?:\d{3}|\w+\W*(?:\^|\*\*))")  # three digits, or a tower
SUCCESS = 0.6
MATH_TRAILING = 50  # characters after the solution that MATH's reward allows


def gsm8k(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    r"""0.6 for the right number, 0.15 for the exact form, 0.1 each for thinking and the tags, 0.05 for the end.

    The number may have a unit, money or markup (`wording`). Without the answer's tags, it is what the last `\boxed{}`
    holds, or what follows the last `####`.

    Args:
        answer: the dataset's column, e.g. "18", or GSM8K's own text that ends with "#### 18".
    """
    parts = [parse(completion) for completion in completions]
    found = [final_answer(completion) for completion in completions]
    right = _right_numbers(found, [text.rpartition("####")[2].strip() for text in answer])
    return [
        round(0.6 * one + 0.15 * part.strict + 0.1 * part.thinks + 0.1 * part.tagged + 0.05 * part.ends(within=1), 6)
        for part, one in zip(parts, right, strict=True)
    ]


def math(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    r"""0.7 for an equal answer, 0.15 for the answer's tags, 0.1 for thinking, 0.05 for a short end.

    Args:
        answer: the dataset's column: the final answer in LaTeX, or a solution that has it in `\boxed{}`.
    """
    parts = [parse(completion) for completion in completions]
    return [
        round(0.7 * right + 0.15 * part.tagged + 0.1 * part.thinks + 0.05 * part.ends(within=MATH_TRAILING), 6)
        for part, right in zip(parts, same_answers([part.solution for part in parts], answer), strict=True)
    ]


def final_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    r"""1 for the right answer, 0 for any other: in `\boxed{}`, else after `####`, else the last number.

    Args:
        answer: the dataset's column: the final answer, or a text that ends with "#### 18" or has it in `\boxed{}`.
    """
    found = [_as_number(_answer_or_number(one)) for one in completions]
    gold = [_as_number(text.rpartition("####")[2].strip()) or "" for text in answer]
    return same_answers(found, gold)


def _answer_or_number(completion: Any) -> str | None:
    return final_answer(completion) or last_number(completion)


def _as_number(text: str | None) -> str | None:
    """The number that a text names, without money, unit or markup; the text itself where it is more than a number."""
    number = one_number(text or "")
    return text if number is None else f"{number.normalize():f}"


for _reward, _final in ((gsm8k, final_answer), (math, final_answer), (final_number, _answer_or_number)):
    _reward.success_threshold = SUCCESS  # type: ignore[attr-defined]
    _reward.thread_safe = True  # type: ignore[attr-defined]
    _reward.final_answer = _final  # type: ignore[attr-defined]


def _right_numbers(found: Sequence[str | None], gold: Sequence[str]) -> list[float]:
    """1 for each right number, 0 for the others. What is more than a number (`36/2`) is for math-verify."""
    numbers = [(one_number(one or ""), one_number(right)) for one, right in zip(found, gold, strict=True)]
    formulas = [None if None not in pair or not _can_be_read(one or "") else one for pair, one in zip(numbers, found)]
    return [
        float(number == right) if None not in (number, right) else equal
        for (number, right), equal in zip(numbers, same_answers(formulas, gold), strict=True)
    ]


def _can_be_read(formula: str) -> bool:
    """Whether math-verify may see it. It reads `18²` as 18, and may not return from a tower of powers."""
    return formula.isascii() and len(formula) <= MAX_FORMULA and _POWERS.search(formula) is None


def same_answers(found: Sequence[str | None], gold: Sequence[str]) -> list[float]:
    """1 for each right solution, 0 for the others; those that are missing or far too long are not compared."""
    asked = [index for index, one in enumerate(found) if one and len(one) <= MAX_CHARACTERS and gold[index].strip()]
    same = equal([found[index] for index in asked], gold=[gold[index].strip() for index in asked])
    right = dict(zip(asked, same, strict=True))
    return [float(right.get(index) or 0.0) for index in range(len(found))]


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
