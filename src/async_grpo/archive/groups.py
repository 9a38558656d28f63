"""The finished groups of one run, and what became of each; for people's tools, on a live run, a dead or a finished one.

Reads files and changes none. A file that cannot be used is left out and named in `skipped`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Container, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.archive.advantages import AdvantageRule, Floats
from async_grpo.archive.history import Dropped, Started, Used, final_history, parse_entry, read_record
from async_grpo.errors import BadFileError, RunDirError
from async_grpo.queue.codec import decode_group
from async_grpo.queue.filesystem import Files, OsFiles, done_folders, job_files
from async_grpo.queue.names import COMPLETE, JobName, shard
from async_grpo.records import RolloutGroup
from async_grpo.rundir.locks import server_alive
from async_grpo.rundir.paths import RUNNING, RunDir, RunState, no_run
from async_grpo.rundir.reading import LineReader, read_object

WAITING, USED, DROPPED, EVALUATED = "waiting", "used", "dropped", "evaluated"


class GroupFate(NamedTuple):
    """What the trainer did with a group."""

    state: str  # waiting (finished, not used yet), used, dropped, evaluated (never for the trainer)
    step: int | None = None  # the optimizer step that used it
    version_used: int | None = None  # the trainer's version then
    policy_version: int | None = None  # of the result that was used
    batch: int | None = None  # which batch of the record; groups of one have the same
    reason: str | None = None  # why it was dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A generated and scored group, with its fate. G completions."""

    group: RolloutGroup
    fate: GroupFate
    totals: Floats  # [G], weighted rewards; NaN where there was none
    finished_at: float  # wall clock, seconds since 1970: for people, nothing relies on it

    @property
    def staleness(self) -> int | None:
        """Policy versions between its generation and its use."""
        return None if self.fate.version_used is None else self.fate.version_used - self.group.policy_version


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedStep:
    """One optimizer step and the groups of a batch that it used first."""

    step: int
    version_used: int
    groups: list[FinishedGroup]
    missing: int  # groups whose files were trimmed (`--keep-done`) or cannot be used


@dataclass(frozen=True, slots=True)
class RunResumed:
    """From here on another process trains, from this step on: what the record has of later steps has not happened."""

    from_step: int


class FinishedGroups:
    """The finished groups of the run in `root`.

    Raises:
        RunDirError: there is no run, it is of another version, or it may not be read.
    """

    def __init__(self, root: Path) -> None:
        self.run, self.state = open_run(root)
        self.hyperparameters: dict[str, Any] = {}
        self.rule = AdvantageRule()
        self._read_hyperparameters()
        self.skipped: dict[str, str] = {}  # file, or line of the record -> a sentence
        self._record = LineReader(self.run.consumption)

    def condition(self) -> str:
        """The run's state: running, finished, stopped, failed, or interrupted, which no process could write down."""
        return "interrupted" if self.state.state == RUNNING and not server_alive(self.run.root) else self.state.state

    def news(self) -> Iterator[UsedStep | RunResumed | Dropped]:
        """What the trainer did since the last call, in its order, with the groups that it used."""
        begins = self._record.position == 0
        self._read_hyperparameters()
        with closing(OsFiles(self.run.root)) as files:
            for entry in self._new_entries():
                if isinstance(entry, Used):
                    yield self._used_step(files, entry)
                elif isinstance(entry, Dropped):
                    yield entry
                elif not begins:
                    yield RunResumed(entry.resumed_from or 0)
                begins = False

    def all(
        self, fates: Mapping[int, GroupFate], *, only: Container[int] | None = None, without: Container[int] = ()
    ) -> Iterator[FinishedGroup]:
        """Every finished group that is there now, or `only` these jobs', `without` those, the newest job first."""
        with closing(OsFiles(self.run.root)) as files:
            for path, name in reversed([*done_files(files), *paths_of_jobs(files, "queue")]):
                if name.state == COMPLETE and (only is None or name.seq in only) and name.seq not in without:
                    found = self._read(files, path, name, fates.get(name.seq, GroupFate(WAITING)))
                    if found is not None:
                        yield found

    def evaluated(self) -> Iterator[FinishedGroup]:
        """Every group of an evaluation that is there now, the newest first."""
        with closing(OsFiles(self.run.root)) as files:
            everything = [*done_files(files, trains=False), *paths_of_jobs(files, "queue", trains=False)]
            for path, name in reversed(everything):
                found = self._read(files, path, name, GroupFate(EVALUATED)) if name.state == COMPLETE else None
                if found is not None:
                    yield found

    def fates(self) -> dict[int, GroupFate]:
        """What became of each group, by sequence number: what the weights of the last step were trained on."""
        processes, broken = read_record(self.run.consumption, self.state.run_id)
        self.skipped |= {sentence: sentence for sentence in broken}
        found = {seq: GroupFate(DROPPED, reason=reason) for process in processes for seq, reason in process.dropped}
        for number, (_, (step, batch)) in enumerate(final_history(processes)):
            for seq, version in zip(batch.seqs, batch.policy_versions, strict=True):
                found[seq] = GroupFate(USED, step, batch.version_used, version, number)
        return found

    def _read_hyperparameters(self) -> None:
        """They are there once the trainer is built; nothing is known of them before, or when they are broken."""
        if self.hyperparameters:
            return
        with suppress(FileNotFoundError, BadFileError):
            self.hyperparameters = read_object(self.run.hyperparameters)
            self.rule = AdvantageRule.from_record(self.hyperparameters)

    def _new_entries(self) -> Iterator[Started | Used | Dropped]:
        for line in self._record.new_lines():
            try:
                entry = parse_entry(line)
            except BadFileError as error:
                self.skipped[line[:80]] = f"A line of {self.run.consumption.name} is broken: {error}."
                continue
            if isinstance(entry, Started) and entry.run_id != self.state.run_id:
                raise RunDirError(f"{self.run.root} holds another run now ({entry.run_id}). Start again.")
            yield entry

    def _used_step(self, files: OsFiles, entry: Used) -> UsedStep:
        paths: dict[int, list[tuple[str, JobName]]] = {}
        for folder in {shard(seq) for seq in entry.batch.seqs}:
            for path, name in paths_of_jobs(files, folder):
                if name.state == COMPLETE:
                    paths.setdefault(name.seq, []).append((path, name))
        groups: list[FinishedGroup] = []
        for seq, version in zip(entry.batch.seqs, entry.batch.policy_versions, strict=True):
            fate = GroupFate(USED, entry.step, entry.batch.version_used, version)
            read = (self._read(files, path, name, fate) for path, name in paths.get(seq, []))
            groups += [found for found in read if found is not None][:1]
        return UsedStep(
            step=entry.step,
            version_used=entry.batch.version_used,
            groups=groups,
            missing=len(entry.batch.seqs) - len(groups),
        )

    def _read(self, files: OsFiles, path: str, name: JobName, fate: GroupFate) -> FinishedGroup | None:
        """The group in a file; None if it is gone, broken, or not the result that was used."""
        try:
            group = decode_group(files.read(path), name, self.state.run_id)
            finished_at = (self.run.root / path).stat().st_mtime
        except FileNotFoundError:
            return None  # moved or trimmed meanwhile
        except BadFileError as error:
            self.skipped[path] = f"{path} cannot be used: {error}."
            return None
        if fate.policy_version not in (None, group.policy_version):
            return None
        return FinishedGroup(group=group, fate=fate, totals=self.rule.totals(group.rewards), finished_at=finished_at)


def open_run(root: Path) -> tuple[RunDir, RunState]:
    """The run in `root`. `RunDirError` says why there is none."""
    run = RunDir(root)
    try:
        if run.root.is_dir() and run.state_file.exists() and not os.access(run.state_file, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(run.state_file))
        state = run.read_state() if run.root.is_dir() else None
        for folder in (run.root, run.root / "queue", run.root / "done") if state is not None else ():
            if folder.is_dir():
                next(folder.iterdir(), None)
    except PermissionError as error:
        raise RunDirError(f"{error.filename} may not be read by this user: the run is someone else's.") from error
    if state is None:
        raise RunDirError(no_run(run.root))
    return run, state


def done_files(files: Files, *, trains: bool = True) -> Iterator[tuple[str, JobName]]:
    """Path and name of every file in done/, the oldest job first; see `paths_of_jobs`."""
    for folder in done_folders(files) if files.exists("done") else ():
        yield from paths_of_jobs(files, folder, trains=trains)


def paths_of_jobs(files: Files, folder: str, *, trains: bool = True) -> list[tuple[str, JobName]]:
    """Path and name of every job's file in a folder, the oldest job first; none if there is no such folder.

    trains: those of jobs for the trainer, or those of evaluations.
    """
    names = sorted(job_files(files, folder)) if files.exists(folder) else ()
    return [(f"{folder}/{name}", name) for name in names if name.trains == trains]
