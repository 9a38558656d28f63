"""An environment with tools to search, to calculate and to run Python."""

from __future__ import annotations

import ast
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar

from async_grpo.envs.facts import generated_facts
from async_grpo.errors import UsageError
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
_PARTS = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "params.index.json", "corpus.jsonl")


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
        return "\n".join(_passages(self.index).search(query, k)) or "Nothing was found."

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
        return _value(ast.parse(expression.strip(), mode="eval").body)
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


class Passages:
    """Passages that are found by their words: BM25, by `bm25s`. May be searched by several threads at once.

    On disk, the index is memory-mapped, so that all workers of a machine share it.

    Raises:
        UsageError: `bm25s` is not installed.
    """

    def __init__(self, retriever: Any, passages: Any) -> None:
        self._retriever, self._passages = retriever, passages
        self._reading = threading.Lock()  # bm25s moves in the file of passages, and then reads

    @classmethod
    def of(cls, passages: Sequence[str]) -> Passages:
        """An index in memory."""
        bm25s = _bm25s()
        retriever = bm25s.BM25()
        retriever.index(bm25s.tokenize(list(passages), show_progress=False), show_progress=False)
        return cls(retriever, list(passages))

    @classmethod
    def load(cls, folder: str | Path) -> Passages:
        """The index that `save` or bm25s (with `corpus=`) wrote, memory-mapped. Nothing of it is unpickled.

        Raises:
            UsageError: there is no index, or it is one of another kind.
        """
        folder = Path(folder)
        missing = [name for name in _PARTS if not (folder / name).is_file()]
        if missing:
            raise UsageError(
                f"{folder} holds no index of bm25s: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                "there. Write one with Passages.of(texts).save(folder), or with bm25s.BM25.save(folder, corpus=texts)."
            )
        try:
            retriever = _bm25s().BM25.load(str(folder), mmap=True, load_corpus=True)
            passages = cls(retriever, retriever.corpus)
            _text(retriever.corpus[len(retriever.corpus) - 1])
            passages.search("the", 1)
            indexed = int(retriever.scores["num_docs"])
        except (ValueError, KeyError, TypeError, IndexError, OSError) as error:
            raise UsageError(
                f"The index in {folder} cannot be read ({type(error).__name__}: {error}). It was written by another "
                "version of bm25s, or is damaged. Write it again."
            ) from error
        if len(retriever.corpus) != indexed:
            raise UsageError(
                f"{folder} has {len(retriever.corpus)} passages in corpus.jsonl and {indexed} in its index: these "
                "are two different indexes. Write it again."
            )
        return passages

    def save(self, folder: str | Path) -> None:
        self._retriever.save(str(folder), corpus=list(self._passages), show_progress=False)

    def search(self, query: str, k: int) -> list[str]:
        """The k best passages, the best first; fewer where no more have a word of the query."""
        words = _bm25s().tokenize(query, show_progress=False)
        best = min(k, len(self._passages))
        everything = range(len(self._passages))
        indices, scores = self._retriever.retrieve(words, corpus=everything, k=best, show_progress=False)
        found = [int(index) for index, score in zip(indices[0], scores[0], strict=True) if score > 0]
        with self._reading:
            return [_text(self._passages[index]) for index in found]


def _text(passage: Any) -> str:
    """bm25s stores texts as `{"id": …, "text": …}`."""
    return str(passage["text"]) if isinstance(passage, dict) else str(passage)


@cache
def _bm25s() -> Any:
    """The package, which computes by numpy: JAX, if it found it, would take three quarters of a GPU's memory."""
    modules: dict[str, Any] = sys.modules
    hidden = "jax" not in modules
    if hidden:
        modules["jax"] = None  # Python's import then says that there is no such package
    try:
        import bm25s
    except ImportError as error:
        raise UsageError(
            "Searching needs the package bm25s, which is not installed. Install it with "
            "`pip install 'async-grpo[search]'`."
        ) from error
    finally:
        if hidden:
            modules.pop("jax", None)
    return bm25s
