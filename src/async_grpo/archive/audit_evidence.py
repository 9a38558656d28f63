"""What the files of a run say about its prompt groups: one snapshot, for `audit` to judge. Changes nothing.

The folders are read in the order in which a group goes through them (queue/, done/, the record), so that one which
moves on meanwhile is seen at least once.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from async_grpo.archive import rollout_state
from async_grpo.archive.groups import done_files, paths_of_jobs
from async_grpo.archive.history import ServerProcess, read_record
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import BadFileError
from async_grpo.formatting import counted
from async_grpo.queue.codec import decode_group, decode_job
from async_grpo.queue.filesystem import Files, OsFiles
from async_grpo.queue.names import (
    COMPLETE,
    DUPLICATE,
    FAILED,
    NOT_TRAINED_ON,
    JobName,
    parse_set_aside,
    reason_name,
)
from async_grpo.records import RolloutGroup
from async_grpo.rundir.paths import RunDir, RunState


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """Rewards by turn of one group, or of several together."""

    turns: int
    rewarded: int  # turns that have a reward
    total: float  # of these rewards


class StoredGroup(NamedTuple):
    """What the file of a finished group says."""

    name: JobName
    worker: str
    policy_version: int
    turn_rewards: TurnRewards | None = None  # None: its trainer gives none
    wrong_turns: str | None = None  # where there are not as many turn rewards as turns
    node: str = ""  # the other machine that generated it


@dataclass(slots=True)
class Evidence:
    """One snapshot."""

    waiting: dict[int, list[JobName]] = field(default_factory=dict)  # files in queue/
    done: dict[int, list[JobName]] = field(default_factory=dict)  # finished groups, and second results
    stored: dict[JobName, StoredGroup] = field(default_factory=dict)  # of every finished group that is sound
    failed: dict[int, int] = field(default_factory=dict)  # jobs given up -> their last attempt
    broken: dict[int, int] = field(default_factory=dict)  # jobs of which a broken file was set aside -> its attempt
    broken_files: int = 0  # set aside
    without_reason: list[str] = field(default_factory=list)
    checkpoints: list[RolloutState] = field(default_factory=list)  # complete ones of this run, oldest first
    processes: list[ServerProcess] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)  # groups that a process did not use
    unusable: list[str] = field(default_factory=list)  # a sentence for each file or line that cannot be read


class EvidenceReader:
    """Takes snapshots of one run; a file that was found sound is not read a second time."""

    def __init__(self, run: RunDir, state: RunState) -> None:
        self._run, self._state = run, state
        self._sound: dict[str, StoredGroup | None] = {}

    def look(self) -> Evidence:
        found = Evidence()
        with closing(OsFiles(self._run.root)) as files:
            for path, name in paths_of_jobs(files, "queue"):
                found.waiting.setdefault(name.seq, []).append(name)
                self._check(files, path, name, found)
            for path, name in done_files(files):
                if self._check(files, path, name, found):
                    found.done.setdefault(name.seq, []).append(name)
            self._look_at_quarantine(files, found)
        self._look_at_checkpoints(found)
        found.processes, broken = read_record(self._run.consumption, self._state.run_id)
        found.unusable += broken
        found.dropped = {seq for process in found.processes for seq, _ in process.dropped}
        return found

    def _check(self, files: Files, path: str, name: JobName, found: Evidence) -> bool:
        """Read a file of queue/ or done/; False if it is not there any more."""
        if path not in self._sound:
            try:
                self._sound[path] = _stored(files.read(path), name, self._state.run_id)
            except FileNotFoundError:
                return False
            except BadFileError as error:
                found.unusable.append(f"{path} is broken: {error}.")
                return True
        stored = self._sound[path]
        if stored is not None:
            found.stored[name] = stored
        return True

    def _look_at_quarantine(self, files: Files, found: Evidence) -> None:
        names = set(files.names("quarantine")) if files.exists("quarantine") else set()
        for aside in sorted(filter(None, map(parse_set_aside, names))):
            if aside.seq >= NOT_TRAINED_ON:
                continue
            if aside.kind == FAILED:
                found.failed[aside.seq] = aside.attempt
                if reason_name(aside.name) not in names:
                    found.without_reason.append(aside.name)
            else:
                found.broken[aside.seq] = aside.attempt
                found.broken_files += 1

    def _look_at_checkpoints(self, found: Evidence) -> None:
        output_dir = Path(self._state.output_dir) if self._state.output_dir else None
        for path in output_dir.glob(f"checkpoint-*/{rollout_state.FILE_NAME}") if output_dir else []:
            try:
                state = rollout_state.read(path)
            except FileNotFoundError:
                continue  # an old checkpoint was removed for a new one
            except BadFileError as error:
                if not rollout_state.names_another(path, self._state.run_id):
                    found.unusable.append(f"{error}.")
                continue
            if state is not None and state.run_id == self._state.run_id:
                found.checkpoints.append(state)
        found.checkpoints.sort(key=lambda state: state.step)


def _stored(data: bytearray, name: JobName, run_id: str) -> StoredGroup | None:
    """What a finished group's file says, or None for a job's; `BadFileError` for any other."""
    if name.state not in (COMPLETE, DUPLICATE):
        decode_job(data, name, run_id)
        return None
    group = decode_group(data, name, run_id)
    return StoredGroup(name, group.worker, group.policy_version, _turn_rewards(group), _wrong_turns(group), group.node)


def _turn_rewards(group: RolloutGroup) -> TurnRewards | None:
    if group.turn_rewards is None:
        return None
    known = group.turn_rewards[np.isfinite(group.turn_rewards)]
    return TurnRewards(len(group.turn_rewards), len(known), float(known.sum()))


def _wrong_turns(group: RolloutGroup) -> str | None:
    """The trainer gives each run of 1 in a completion's mask the advantage of one turn."""
    if group.turn_counts is None:
        return None
    mask = np.ones_like(group.completion_ids) if group.tool_mask is None else group.tool_mask.astype(np.int32)
    for index, part in enumerate(np.split(mask, np.cumsum(group.completion_lengths)[:-1])):
        turns, rewards = int((np.diff(part, prepend=0) == 1).sum()), int(group.turn_counts[index])
        if turns != rewards:
            given, there = counted(rewards, "turn reward"), counted(turns, "turn")
            return f"completion {index} has {given}, and its tokens have {there}"
    return None
