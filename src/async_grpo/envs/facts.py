"""Facts that no model can know: about people and places whose names a seed makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FACTS = 200
_STARTS = ["b", "br", "d", "dr", "f", "g", "gr", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "v", "z"]
_MIDDLES = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
_ENDS = ["l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x"]
_KINDS = (  # what is said of a subject, the question for it, and whether the answer is a number
    ("The capital of {} is {}.", "What is the capital of {}?", False),
    ("The river {} flows into the {} sea.", "Into which sea does the river {} flow?", False),
    ("{} was founded in the year {}.", "In which year was {} founded?", True),
    ("The painter {} was born in {}.", "Where was the painter {} born?", False),
    ("Mount {} is {} metres high.", "How many metres high is Mount {}?", True),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: a passage to be found, and a question whose answer is in no other passage."""

    passage: str
    question: str
    answer: str


def generated_facts(seed: int = 0, count: int = FACTS) -> list[Fact]:
    """The same facts for the same seed, on every machine. No name and no answer occurs twice."""
    draw = random.Random(seed)
    used: set[str] = set()
    made = []
    for index in range(count):
        statement, question, is_number = _KINDS[index % len(_KINDS)]
        subject = _new(lambda: _name(draw), used)
        answer = _new(lambda: str(draw.randint(1000, 8999)), used) if is_number else _new(lambda: _name(draw), used)
        made.append(Fact(statement.format(subject, answer), question.format(subject), answer))
    return made


def _new(make: Callable[[], str], used: set[str]) -> str:
    while (made := make()) in used:
        pass
    used.add(made)
    return made


def _name(draw: random.Random) -> str:
    syllables = (draw.choice(_STARTS) + draw.choice(_MIDDLES) for _ in range(draw.randint(2, 3)))
    return ("".join(syllables) + draw.choice(_ENDS)).capitalize()
