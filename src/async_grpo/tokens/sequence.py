"""Tokens in a row, in one form from the engine to the queue file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from async_grpo.tokens.kept_tokens import Kept

NO_VERSION = -1
_LEFT_OUT: Any = None


@dataclass(slots=True)
class Tokens:
    """Tokens in their order, and a column for each thing that is noted of them, one value a token.

    A column that is left out has its value for "unknown" for every token.
    """

    ids: list[int] = field(default_factory=list)
    # natural log, at the sampling temperature; 0 for what nobody sampled
    logprobs: list[float] = field(default=_LEFT_OUT, metadata={"unknown": 0.0})
    mask: list[int] = field(default=_LEFT_OUT, metadata={"unknown": 1})  # 0: a tool or an environment wrote it
    # that sampled it, where weights change while a group is sampled
    versions: list[int] = field(default=_LEFT_OUT, metadata={"unknown": NO_VERSION})
    # that truncated sampling kept, where `logprobs` are of those tokens alone
    kept: list[Kept] = field(default=_LEFT_OUT, metadata={"unknown": b""})

    def __post_init__(self) -> None:
        for name, unknown in _UNKNOWN.items():
            if getattr(self, name) is _LEFT_OUT:
                setattr(self, name, [unknown] * len(self.ids))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, part: slice) -> Tokens:
        return Tokens(*(getattr(self, name)[part] for name in _COLUMNS))

    def __add__(self, others: Tokens) -> Tokens:
        whole = self[:]
        whole.extend(others)
        return whole

    def extend(self, others: Tokens) -> None:
        for name in _COLUMNS:
            getattr(self, name).extend(getattr(others, name))

    @property
    def names_versions(self) -> bool:
        return any(version != NO_VERSION for version in self.versions)

    @property
    def names_kept(self) -> bool:
        return any(self.kept)

    def noted(self, start: int, sampled: Tokens) -> Tokens:
        """These tokens with what the engine noted of `sampled`, which are at `start`, and may have been cut."""
        mine = self[start : start + len(sampled)]
        noted = replace(sampled[: len(mine)], ids=mine.ids, logprobs=mine.logprobs, mask=mine.mask)
        return self[:start] + noted + self[start + len(mine) :]

    def of_version(self, version: int) -> Tokens:
        """These tokens, where those whose version is unknown have this one."""
        return replace(self, versions=[version if known == NO_VERSION else known for known in self.versions])


_COLUMNS = [each.name for each in fields(Tokens)]
_UNKNOWN = {each.name: each.metadata["unknown"] for each in fields(Tokens) if each.metadata}


def unsampled(ids: Sequence[int], version: int = NO_VERSION) -> Tokens:
    """Tokens that no model wrote."""
    return Tokens(list(ids), mask=[0] * len(ids), versions=[version] * len(ids))


def as_tokens(*columns: Iterable[Any]) -> list[Tokens]:
    """The completions with these ids, log-probabilities and, if they are given, masks, as TRL has them."""
    return [Tokens(*row) for row in zip(*columns, strict=True)]


def ids_and_logprobs(completions: Iterable[Tokens]) -> tuple[list[list[int]], list[list[float]]]:
    """As TRL takes them, in lists of its own."""
    pairs = [(list(tokens.ids), list(tokens.logprobs)) for tokens in completions]
    return [ids for ids, _ in pairs], [logprobs for _, logprobs in pairs]
