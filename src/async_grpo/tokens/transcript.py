"""The record of one completion on its way: what the model wrote, and what it read between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from async_grpo.tokens.sequence import NO_VERSION, Tokens, unsampled


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """In tokens."""

    completion: int  # of all turns, and what is between them
    sequence: int  # of prompt and completion, that the model takes


class Transcript:
    """Tokens stay as they were sampled: a later turn continues `whole`, and nothing is tokenised twice."""

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self.prompt_ids = list(prompt_ids)
        self.tokens = Tokens()
        self.turns = 0

    @property
    def whole(self) -> list[int]:
        """The prompt and the completion so far."""
        return self.prompt_ids + self.tokens.ids

    def read(self, ids: Sequence[int]) -> None:
        """Note what somebody else has written. Its version is that of the turn before."""
        self.tokens.extend(unsampled(ids, self.tokens.versions[-1] if self.tokens else NO_VERSION))

    def write(self, turn: Tokens) -> None:
        """Note what the model has written."""
        self.tokens.extend(turn)
        self.turns += 1

    def tokens_left(self, limits: TokenLimits, unread: Sequence[int] = ()) -> int:
        """How many tokens the model may write behind `unread`. Not positive: none."""
        written = len(self.tokens) + len(unread)
        return min(limits.completion - written, limits.sequence - len(self.prompt_ids) - written)
