"""A set of sequence numbers that stays small however long the run is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class SeqSet:
    """Sequence numbers, nearly all from 0 to the highest one. Only those that are missing below it take memory."""

    def __init__(self, seqs: Iterable[int] = ()) -> None:
        self._end = 0  # one more than the highest
        self._missing: set[int] = set()  # below it
        self.update(seqs)

    def update(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if seq < self._end:
                self._missing.discard(seq)
            else:
                self._missing.update(range(self._end, seq))
                self._end = seq + 1

    def union(self, seqs: Iterable[int]) -> SeqSet:
        """A new set with these, too."""
        union = SeqSet()
        union._end, union._missing = self._end, set(self._missing)
        union.update(seqs)
        return union

    def first_missing(self, ignoring: Iterable[int] = ()) -> int:
        """The lowest sequence number that is neither in the set nor among `ignoring`."""
        ignored = set(ignoring)
        first = min(self._missing - ignored, default=self._end)
        while first in ignored:
            first += 1
        return first

    def above(self, seq: int) -> list[int]:
        """The members that are not below `seq`, in order."""
        return [one for one in range(seq, self._end) if one not in self._missing]

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, int) and 0 <= seq < self._end and seq not in self._missing

    def __iter__(self) -> Iterator[int]:
        return iter(self.above(0))

    def __len__(self) -> int:
        return self._end - len(self._missing)
