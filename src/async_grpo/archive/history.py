"""`consumed.jsonl`: which optimizer step used which prompt groups, for `audit` and `replay`.

Each process that trains first writes the step that it continues from. Lines of older processes for later steps are not
part of what its checkpoint was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import BadFileError
from async_grpo.queue.names import SEQS
from async_grpo.rundir.files import LineFile
from async_grpo.rundir.reading import LineReader, parse_object
from async_grpo.rundir.shape import shaped

MOST_BROKEN = 100  # sentences about lines that are not valid


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedBatch:
    """One generation batch that the trainer was given."""

    version_used: int  # the trainer's version when it took the batch
    seqs: list[int]
    policy_versions: list[int]  # that generated each of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How the groups of a process were sampled, for a replay by another correction."""

    generator: str | None  # of the launcher's workers; None: they were started by hand
    correction: str
    departures: list[str]  # what makes their log-probabilities other than the loss's, unless they name kept tokens


class ConsumptionRecord(LineFile):
    """Appends to `path`. Call `sync` before a checkpoint says that what was noted so far has happened."""

    def __init__(
        self, path: Path, *, run_id: str, resumed_from: int | None, max_staleness: int, sampled: Sampler | None = None
    ) -> None:
        super().__init__(path)
        how = {} if sampled is None else {"sampled": asdict(sampled)}
        self._append(run_id=run_id, resumed_from=resumed_from, max_staleness=max_staleness, **how)

    def used(self, step: int, batches: Iterable[UsedBatch]) -> None:
        """Optimizer step `step` is done, and these batches were used for it."""
        for batch in batches:
            self._append(step=step, **asdict(batch))

    def dropped(self, seq: int, reason: str) -> None:
        """A group will not be used: it was over age, or all its rewards were equal."""
        self._append(dropped=seq, reason=reason)

    def _append(self, **entry: Any) -> None:
        self.append(json.dumps(entry))


class Started(NamedTuple):
    """A process that trains begins."""

    run_id: str
    resumed_from: int | None  # step of its checkpoint
    max_staleness: int
    sampled: Sampler | None  # None: it was not said


class Used(NamedTuple):
    """An optimizer step and a batch that it used."""

    step: int
    batch: UsedBatch


class Dropped(NamedTuple):
    """A finished group that is not used."""

    seq: int
    reason: str


def parse_entry(line: str) -> Started | Used | Dropped:
    """One line of the record. Raises `BadFileError`, which says what is wrong with it."""
    entry = parse_object(line)
    if "resumed_from" in entry:
        return shaped(Started, [entry.get(name) for name in Started._fields])
    if "dropped" in entry:
        dropped = shaped(Dropped, [entry["dropped"], entry.get("reason", "")])
        return Dropped(_sound_seqs([dropped.seq])[0], dropped.reason)
    step = shaped(int, entry.pop("step", None), "step")
    batch = shaped(UsedBatch, entry)
    if len(_sound_seqs(batch.seqs)) != len(batch.policy_versions):
        raise BadFileError(f"{len(batch.seqs)} groups and {len(batch.policy_versions)} policy versions")
    return Used(step, batch)


def _sound_seqs(seqs: list[int]) -> list[int]:
    if not all(0 <= seq < SEQS for seq in seqs):
        raise BadFileError("a sequence number is impossible")
    return seqs


@dataclass(slots=True)
class ServerProcess:
    """What one parameter server process wrote into the record."""

    resumed_from: int | None  # step of its checkpoint
    max_staleness: int
    sampled: Sampler | None
    used: list[Used] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        return max((step for step, _ in self.used), default=self.resumed_from or 0)

    def seqs(self) -> set[int]:
        """Every sequence number that it used or dropped."""
        return {seq for _, batch in self.used for seq in batch.seqs} | {seq for seq, _ in self.dropped}


def newest_version(processes: Sequence[ServerProcess]) -> int:
    """The newest version that these processes can have reached."""
    steps = [step for process in processes for step, _ in process.used]
    versions_a_line = max((later - step for step, later in pairwise(steps)), default=1)
    return max((process.last_step for process in processes), default=0) + max(1, versions_a_line)


def read_record(path: Path, run_id: str) -> tuple[list[ServerProcess], list[str]]:
    """The processes of a run in the order in which they ran, and a sentence for each line that is not valid."""
    processes: list[ServerProcess] = []
    broken: list[str] = []
    try:
        for number, line in enumerate(LineReader(path).new_lines(half=True), start=1):
            try:
                _add(processes, parse_entry(line), run_id)
            except BadFileError as error:
                if len(broken) < MOST_BROKEN:
                    broken.append(f"Line {number} of {path.name} is broken: {error}.")
    except BadFileError as error:
        broken.append(f"{error}.")
    return processes, broken


def _add(processes: list[ServerProcess], entry: Started | Used | Dropped, run_id: str) -> None:
    if isinstance(entry, Started):
        if entry.run_id != run_id:
            raise BadFileError(f"it is of run {entry.run_id}, this is run {run_id}")
        processes.append(ServerProcess(entry.resumed_from, entry.max_staleness, entry.sampled))
    elif not processes:
        raise BadFileError("no line before it says which process wrote it")
    elif isinstance(entry, Used):
        processes[-1].used.append(entry)
    else:
        processes[-1].dropped.append(entry)


def final_history(processes: Iterable[ServerProcess]) -> list[tuple[int, Used]]:
    """What the weights of the last step were trained on, in order, each with the index of its process.

    A process continues from its checkpoint, so steps of earlier processes after that one do not count.
    """
    history: list[tuple[int, Used]] = []
    for index, process in enumerate(processes):
        history = [(earlier, used) for earlier, used in history if used.step <= (process.resumed_from or 0)]
        history += [(index, used) for used in process.used]
    return history
