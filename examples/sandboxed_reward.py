"""A reward that runs the code in a completion: 1 if it prints the right number, else 0.

Copy `printed_the_answer` into your setup file and give it to the trainer: `reward_funcs=[printed_the_answer]`. The
dataset needs a column `answer` with a number. Start the run with `ASYNC_GRPO_RUN_MODEL_CODE=1`; without it, or where
the machine cannot isolate a program, the reward raises and nothing is run.

    ASYNC_GRPO_RUN_MODEL_CODE=1 python examples/sandboxed_reward.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from async_grpo.rewards.sandbox import Limits, run_code

LIMITS = Limits(wall_s=2.0, cpu_s=2, memory_bytes=128 << 20, processes=1, output_bytes=4096)
LONGEST_NUMBER = 32  # characters

_CODE_BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)


def printed_the_answer(completions: Sequence[Any], answer: Sequence[float | str], **_: Any) -> list[float]:
    """One reward a completion, 0 or 1."""
    return [
        float(_printed_number(_text_of(completion)) == float(right))
        for completion, right in zip(completions, answer, strict=True)
    ]


printed_the_answer.thread_safe = True  # several calls at a time, each with programs of its own


def _printed_number(text: str) -> float | None:
    """The output of the last code block in `text`, if it is exactly one number."""
    blocks = _CODE_BLOCK.findall(text)
    if not blocks:
        return None
    result = run_code(blocks[-1], limits=LIMITS)
    return parse_number(result.stdout) if result.ok else None


def parse_number(text: str) -> float | None:
    """One finite JSON number of bounded length, or None: the program decides what it prints."""
    text = text.strip()
    if len(text) > LONGEST_NUMBER:
        return None
    try:
        number = json.loads(text)
    except ValueError:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return None
    return float(number)


def _text_of(completion: Any) -> str:
    """A completion is text, or messages in conversational datasets."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


if __name__ == "__main__":
    examples = {
        "right": "```python\nprint(6 * 7)\n```",
        "wrong": "```python\nprint(6 * 8)\n```",
        "endless": "```python\nwhile True: pass\n```",
        "tries to read your files": "```python\nprint(open('/etc/passwd').read())\n```",
        "no code": "It is 42.",
    }
    for name, reward in zip(examples, printed_the_answer(list(examples.values()), [42] * len(examples)), strict=True):
        print(f"{reward:g}  {name}")
