"""Tools, calls of them as a model writes them, and a chat template that knows none."""

from __future__ import annotations

import json
from typing import Any

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def written(*calls: tuple[str, Any]) -> str:
    return "".join(f"<tool_call>\n{json.dumps({'name': name, 'arguments': of})}\n</tool_call>" for name, of in calls)


def double(number: int) -> int:
    """Double a number.

    Args:
        number: the number.
    """
    return 2 * number


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.

    Returns:
        Their product.
    """
    return a * b


class Adder:
    """An environment: adds up what the model tells it to."""

    def reset(self, **row: Any) -> str:
        self.total = 0
        return ""

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what to add.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


TOOL_CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call>'


def says_twelve(completions: list[Any], **_: Any) -> list[float]:
    return [float(completion[-1]["content"] == "twelve") for completion in completions]


def counts_tool_results(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(message["role"] == "tool" for message in completion)) for completion in completions]
