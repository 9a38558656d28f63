"""An environment with tools to search, to calculate and to run Python."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from async_grpo.envs.facts import generated_facts
from async_grpo.envs.index import Passages
from async_grpo.rewards.sandbox import Limits, run_code

MOST_RESULTS = 10
MOST_DIGITS = 300  # of a number, and of what it is raised to
PYTHON_S = 10.0
_OUTPUT_BYTES = 16_384

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class SearchEnv:
    """Answers questions by searching passages. `environment_factory=SearchEnv`, or a subclass with another `index`.

    Its passages are the generated facts of seed 0. A subclass may name another index, by its path or as an object:

        class Wikipedia(SearchEnv):
            index = "/data/wikipedia-bm25s"
    """

    thread_safe: ClassVar[bool] = True  # searching changes nothing
    index: ClassVar[Passages | str | Path | None] = None

    def __init__(self) -> None:
        """`UsageError`: the index is missing, or is no index. TRL makes an environment when the trainer is built."""
        _passages(self.index)

    def reset(self, **row: Any) -> None:
        """Nothing is added to the prompt."""

    def search(self, query: str, k: int = 1) -> str:
        """Search for passages.

        Args:
            query: The words to look for.
            k: How many passages to return.

        Returns:
            The passages, the best first.
        """
        if not isinstance(query, str) or not query.strip():
            raise ValueError("the query is empty")
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MOST_RESULTS:
            raise ValueError(f"k must be a whole number from 1 to {MOST_RESULTS}")
        found = _passages(self.index).search(query, k)
        return "\n".join(found) or "Nothing was found."

    def calculate(self, expression: str) -> str:
        """Calculate with numbers.

        Args:
            expression: Numbers, + - * / // % ** and brackets.

        Returns:
            The result.
        """
        return str(calculated(expression))

    def python(self, code: str) -> str:
        """Run a Python program.

        Args:
            code: The program, which prints its results.

        Returns:
            What it printed.
        """
        result = run_code(code, limits=Limits(wall_s=PYTHON_S, output_bytes=_OUTPUT_BYTES))
        if not result.ok:
            raise ValueError(f"the program {result.outcome}: {(result.stderr or result.stdout)[-1000:]}")
        return result.stdout


def calculated(expression: str) -> float | int:
    """The value of an arithmetic expression. `ValueError`: it is none."""
    if not isinstance(expression, str):
        raise ValueError(f"{expression!r} cannot be calculated: it is no text")
    try:
        value: float | int = _value(ast.parse(expression.strip(), mode="eval").body)
        return value
    except (SyntaxError, TypeError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression[:100]!r} cannot be calculated: {error}") from error


def _value(node: ast.AST) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left), _value(node.right)
        if abs(exponent) > MOST_DIGITS:
            raise ValueError("the exponent is too large")
        return _small(base**exponent)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _small(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    raise ValueError(f"only numbers and + - * / // % ** can be calculated, not {ast.unparse(node)[:50]!r}")


def _small(value: Any) -> Any:
    if isinstance(value, complex):
        raise ValueError("the result is no real number")
    if isinstance(value, int) and value.bit_length() > 4 * MOST_DIGITS:
        raise ValueError("the number is too large")
    return value


@lru_cache(maxsize=8)
def _passages(index: Passages | str | Path | None) -> Passages:
    """The index that all environments of the process share."""
    if isinstance(index, Passages):
        return index
    return Passages.of([fact.passage for fact in generated_facts()]) if index is None else Passages.load(index)
