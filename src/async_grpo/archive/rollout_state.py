"""What a checkpoint records about the rollouts, besides what transformers saves.

`rollout_state.json` is the last file written into a checkpoint. `checkpoint_folders` has the rest of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Set
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.queue.names import NOT_TRAINED_ON
from async_grpo.rundir.files import write_json
from async_grpo.rundir.reading import naming, read_object
from async_grpo.rundir.shape import shaped

FILE_NAME = "rollout_state.json"
FORMAT = 1


class Sampled(NamedTuple):
    """A group and the policy version that sampled it."""

    seq: int
    version: int


class RowCounts(NamedTuple):
    """What the rewards of its groups say of a dataset row; counts are decayed."""

    row: int
    successes: float = 0.0
    failures: float = 0.0
    graded: bool = False  # groups are counted, not completions


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutState:
    """Which groups the weights of a checkpoint have been trained on."""

    run_id: str
    step: int
    next_seq: int  # the first sequence number never issued
    rounds: int  # generation batches consumed, with the one that the checkpoint is in the middle of
    unusable: list[int]  # ascending; will never be trained on: set aside, or dropped as over age
    consumed_below: int  # every usable sequence number below this one is consumed
    consumed: list[int]  # and these above it, ascending
    passes_done: int = 0  # forward passes on the last batch, if there are more to come; it is in `batch_file.FILE_NAME`
    waiting: list[Sampled] = field(default_factory=list)  # finished groups; of a deterministic run only
    row_counts: list[RowCounts] = field(default_factory=list)  # with --choose-prompts
    run_dir: str = ""  # of the run, absolute, when the checkpoint was written
    files: dict[str, str] = field(default_factory=dict)  # the digest of each file that a resume reads
    format: int = FORMAT

    def __contains__(self, seq: object) -> bool:
        """Whether the run will not come back to group `seq`."""
        if not isinstance(seq, int):
            return False
        return seq < self.consumed_below or _has(self.consumed, seq) or _has(self.unusable, seq)

    def has_consumed(self, seq: int) -> bool:
        """Whether the weights were trained on group `seq`."""
        return seq in self and not _has(self.unusable, seq)

    def consumed_seqs(self) -> Iterator[int]:
        """Every sequence number that has been trained on, in order."""
        unusable = set(self.unusable)
        yield from (seq for seq in range(self.consumed_below) if seq not in unusable)
        yield from self.consumed

    @property
    def consumed_groups(self) -> int:
        """How many groups have been trained on."""
        return self.consumed_below - bisect_left(self.unusable, self.consumed_below) + len(self.consumed)

    def contradiction(self) -> str | None:
        """Why these numbers cannot be those of a run, or None."""
        if not 0 <= self.consumed_below <= self.next_seq <= NOT_TRAINED_ON:
            return f"consumed_below {self.consumed_below} and next_seq {self.next_seq} are not possible together"
        if min(self.step, self.rounds, self.passes_done) < 0:
            return "step, rounds or passes_done is negative"
        for name, seqs in (("consumed", self.consumed), ("unusable", self.unusable)):
            if any(seq >= later for seq, later in pairwise(seqs)) or (
                seqs and not 0 <= seqs[0] <= seqs[-1] < NOT_TRAINED_ON
            ):
                return f"{name} is not an ascending list of sequence numbers"
        if self.consumed and self.consumed[0] < self.consumed_below:
            return f"consumed names group {self.consumed[0]}, which is below consumed_below"
        if self.rounds == 0 and self.consumed_below + len(self.consumed) > len(self.unusable):
            return f"0 rounds cannot have consumed {self.consumed_below + len(self.consumed)} groups"
        return None


def _has(ascending: list[int], seq: int) -> bool:
    at = bisect_left(ascending, seq)
    return at < len(ascending) and ascending[at] == seq


def pack_consumed(below: int, above: Set[int], unusable: Iterable[int] = ()) -> tuple[int, set[int]]:
    """`(1, {1, 2, 5})` -> `(3, {5})`: the two stay small, since groups are used nearly in order.

    Args:
        below: every usable sequence number below this one is consumed.
        above: and so are these.
    """
    done = above | set(unusable)
    while below in done:
        below += 1
    return below, {seq for seq in above if seq >= below}


def write(checkpoint: Path, state: RolloutState) -> None:
    write_json(checkpoint / FILE_NAME, asdict(state))


def names_another(path: Path, run_id: str) -> bool:
    """Whether the state in the file `path`, which cannot be used, says at least that it is another run's."""
    try:
        named = read_object(path).get("run_id")
    except (OSError, BadFileError):
        return False
    return isinstance(named, str) and named != run_id


def read(path: Path) -> RolloutState | None:
    """The state in the file `path`, None if it is of another format; `BadFileError` if it is broken."""
    data = read_object(path)
    if data.get("format", FORMAT) != FORMAT:
        return None
    with naming(path):
        state = shaped(RolloutState, data)
        if reason := state.contradiction():
            raise BadFileError(reason)
    return state
