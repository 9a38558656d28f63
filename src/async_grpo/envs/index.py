"""Passages that are found by their words: BM25, by the package `bm25s` (numpy only).

Extra `search` of the package installs it. An index on disk is memory-mapped, so that all workers of a machine share it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError

_PARTS = ("data.csc.index.npy", "indices.csc.index.npy", "indptr.csc.index.npy", "params.index.json", "corpus.jsonl")


class Passages:
    """An index of passages. May be searched by several threads at once.

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
