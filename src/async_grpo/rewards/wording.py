r"""The one number that a short answer names, however a model words it: `\$18.00`, `**18** eggs`, `eighteen`."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_CHARACTERS = 100  # of an answer that is one number

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_MONEY = r"[$€£¥₹]"
_LEAD = r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is)?\s*:?|####|=)"
_UNIT_AT_DIGITS = r"(?:kg|mg|g|km|cm|mm|ml|lbs?|oz|ft|in|hrs?|h|mins?|s|am|pm)\b"  # "18k" and "18m" are other numbers
_ANSWER = re.compile(
    rf"{_LEAD}?\s*(?P<sign>[-+]?)\s*{_MONEY}?(?P<sign_of_money>-?)"
    rf"(?:(?P<digits>{_NUMBER})\s?(?P<mark>%|{_MONEY}|{_UNIT_AT_DIGITS})?(?=\W|$))?"
    r"\s*(?P<words>(?:[a-z][a-z'./-]*(?:\s+[a-z][a-z'./-]*)*\s*)?)\.?",  # words at spaces alone: in one way
    re.IGNORECASE | re.ASCII,
)
_COMMANDS = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_BOLD = re.compile(r"(?<!\S)(\*\*|__|\*|_|`)(?=\S)([^*_`]+)\1(?![\w*])")
_SPACES = re.compile(r"\\[,!; ]|~|\s+")

_ONES = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_NUMERALS = {word: value for value, word in enumerate(_ONES)} | {word: 10 * n for n, word in enumerate(_TENS, start=2)}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
_OF_NO_UNIT = {"or", "and", "to", "plus", "minus", "times", "over", "less", "more", "half", "point", "not"}


def one_number(text: str) -> Decimal | None:
    """The number that a text names, without money, unit, markup or a final point; None: not exactly one.

    A per cent is a hundredth: `18%` is 0.18. What has to be computed (`36/2`) is no number here.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    match = _ANSWER.fullmatch(_plain(text))
    if match is None:
        return None
    words = re.findall(r"[a-z']+", match["words"].lower())
    number, unit = _of_digits(match, words) if match["digits"] else _of_words(words)
    if number is None or {*unit} & {*_OF_NO_UNIT, *_SCALES, *_NUMERALS}:
        return None
    return -number if "-" in match["sign"] + match["sign_of_money"] else number


def _plain(text: str) -> str:
    """The text without LaTeX's and Markdown's marks."""
    text = text.replace("\N{MINUS SIGN}", "-").replace("\\$", "$").replace("\\%", "%").replace("{,}", ",")
    for _ in range(2):  # \boxed{18\text{ eggs}}
        text = _COMMANDS.sub(r"\1", text)
    text = _SPACES.sub(" ", text).strip()
    for left, right in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > 2 and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    return _BOLD.sub(r"\2", text).strip()


def _of_digits(match: re.Match[str], words: list[str]) -> tuple[Decimal, list[str]]:
    """The value, and the words of its unit."""
    number = Decimal(match["digits"].replace(",", ""))
    while words and words[0] in _SCALES:
        number, words = number * _SCALES[words[0]], words[1:]
    if match["mark"] == "%" or words[:1] == ["percent"] or words[:2] == ["per", "cent"]:
        return number / 100, []
    return number, words


def _of_words(words: list[str]) -> tuple[Decimal | None, list[str]]:
    """`["one", "hundred", "five", "eggs"]` -> 105 and `["eggs"]`."""
    total = below = used = 0
    for word in words:
        value = _NUMERALS.get(word)
        if value is not None and _fits_behind(below, value):
            below += value
        elif word == "hundred" and 0 < below < 10:
            below *= 100
        elif word in _SCALES and below:
            total, below = total + below * _SCALES[word], 0
        else:
            break
        used += 1
    return (Decimal(total + below) if used else None), words[used:]


def _fits_behind(below: int, value: int) -> bool:
    """`twenty` takes a `one`, `hundred` takes anything below it, `one` takes nothing."""
    return below % 100 == 0 or (below % 100 >= 20 and below % 10 == 0 and 0 < value < 10)
