"""The form of an answer that the rewards for mathematics and code ask for, and the parts of it.

    <start_working_out> 16 - 3 - 4 = 9, 9 * 2 = 18 <end_working_out><SOLUTION>18</SOLUTION>

The first tag may be the end of the prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

WORK_START, WORK_END = "<start_working_out>", "<end_working_out>"
SOLUTION_START, SOLUTION_END = "<SOLUTION>", "</SOLUTION>"

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_END_OF_TEXT = re.compile(r"<\|\w+\|>\s*\Z")


@dataclass(frozen=True, slots=True)
class TaggedAnswer:
    solution: str | None  # between the last pair of its tags; None: there is none
    strict: bool  # working out, one solution, and nothing else
    thinks: bool  # the working out ends exactly once, after some text
    tagged: bool  # exactly one pair of the solution's tags, in their order
    trailing: int  # characters after the solution; 0 without one

    def ends(self, *, within: int) -> bool:
        """Whether there is a solution, and fewer than `within` characters after it."""
        return self.solution is not None and self.trailing < within


def text_of(completion: Any) -> str:
    """The text of a completion: itself, or its last message's."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""


def parse(completion: Any) -> TaggedAnswer:
    """The parts of a completion, in either of TRL's forms."""
    text = text_of(completion)
    _, opened, after = text.rpartition(SOLUTION_START)
    inside, closed, rest = after.partition(SOLUTION_END)
    found = bool(opened and closed)
    work, ended, _ = text.partition(WORK_END)
    return TaggedAnswer(
        solution=inside.strip() if found else None,
        strict=_is_strict(text),
        thinks=text.count(WORK_END) == 1 and bool(ended) and bool(work.replace(WORK_START, "").strip()),
        tagged=found and text.count(SOLUTION_START) == text.count(SOLUTION_END) == 1,
        trailing=len(_END_OF_TEXT.sub("", rest).strip()) if found else 0,
    )


def _is_strict(text: str) -> bool:
    """By parts: one pattern for all of it takes time with the square of the length, and models write long texts."""
    work, ended, rest = text.partition(WORK_END)
    work = work.strip().removeprefix(WORK_START)
    before, opened, rest = rest.partition(SOLUTION_START)
    inside, closed, after = rest.partition(SOLUTION_END)
    return (
        bool(ended and opened and closed and work.strip() and inside)
        and WORK_START not in work
        and not before.strip()
        and SOLUTION_START not in inside
        and not _END_OF_TEXT.sub("", after).strip()
    )


def final_answer(completion: Any) -> str | None:
    r"""The one answer that counts, and that a majority votes on: in the tags, else in `\boxed{}`, else after `####`."""
    solution = parse(completion).solution
    if solution is not None:
        return solution
    text = text_of(completion)
    _, boxed, rest = text.rpartition("\\boxed{")
    if boxed:
        return _until_closed(rest)
    _, marked, rest = text.rpartition("####")
    return _END_OF_TEXT.sub("", rest).strip() if marked else None


def last_number(completion: Any) -> str | None:
    """The last number that stands in a completion, without the commas of thousands; None: there is none."""
    found = _NUMBER.findall(text_of(completion))
    return found[-1].replace(",", "").rstrip(".") if found else None


def _until_closed(text: str) -> str | None:
    """What stands before the brace that closes the one before the text."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index].strip()
    return None
