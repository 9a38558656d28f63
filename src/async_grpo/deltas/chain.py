"""A folder of versions: `000000.full`, `000001.delta`, `000002.delta`, …, and reading it back.

    chain.json        what the versions are of: chain id, run, kind; written once
    model/            configuration and tokenizer, for a rebuilt checkpoint
    000000.full       a snapshot of version 0: needs no other file
    000001.delta      from the version before it in the folder to version 1
    latest            the newest version; moved when its file is whole on the disk
    superseded-1/     versions that a resumed run has trained again
    writer.lock       kernel lock: one writer at a time

Each file names its chain, its version, the version it starts from, and the hash of the weights before and after. So one
that was renamed, swapped or comes from elsewhere is noticed, and nothing is rebuilt wrongly.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_grpo.errors import BadFileError, DeltaChainError
from async_grpo.formatting import counted
from async_grpo.rundir.reading import naming, open_plain, read_object
from async_grpo.rundir.shape import shaped
from async_grpo_ipc.delta import Buffer, Delta, DeltaError, apply, file

FORMAT = "async-grpo-deltas/1"
CHAIN_FILE, LATEST, MODEL = "chain.json", "latest", "model"
_NAME = re.compile(r"(\d{6,})\.(full|delta)")


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What `chain.json` says."""

    chain: str
    run_id: str
    kind: str = "model"  # or "adapter"
    frozen: str | None = None  # the hash of the weights that an adapter belongs to
    names: dict[str, str] = field(default_factory=dict)  # published name -> name in a checkpoint, where they differ
    format: str = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPlace:
    """What each file says about itself."""

    chain: str
    version: int
    before: int | None  # the version before it in the chain; a delta starts from it
    span: int = 1  # optimizer steps since then


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the chain, of which the header could be read."""

    path: Path
    place: VersionPlace
    header: file.DeltaHeader

    @property
    def version(self) -> int:
        return self.place.version

    @property
    def is_snapshot(self) -> bool:
        return self.header.delta.base is None

    @property
    def hash(self) -> str:
        return self.header.delta.result

    def load(self) -> Delta:
        """`DeltaError` gives the reason where the file is damaged."""
        with _opened(self.path) as found:
            return file.read(found)[0]


@dataclass(frozen=True, slots=True)
class Step:
    """One version of a walk over the chain."""

    entry: Entry
    delta: Delta
    buffers: dict[str, Buffer]


@dataclass(frozen=True, slots=True)
class ChainFault:
    """Why a file cannot be used."""

    version: int
    file: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `verify` found."""

    versions: list[int]  # that can be rebuilt
    problems: list[ChainFault]

    @property
    def intact_up_to(self) -> int | None:
        """The last version before the first problem; None: not even the first."""
        first = min((problem.version for problem in self.problems), default=None)
        return max((version for version in self.versions if first is None or version < first), default=None)


class Chain:
    """The versions in `folder`, as their headers have them. `DeltaChainError` where there is no chain."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = read_about(folder)
        self.entries: dict[int, Entry] = {}
        self.problems: dict[int, ChainFault] = {}
        for path, version, kind in _files(folder):
            try:
                self.entries[version] = self._entry(path, version, kind)
            except DeltaError as error:
                self.problems[version] = ChainFault(version, path.name, str(error))
        self._set_aside_other_models()

    @property
    def versions(self) -> list[int]:
        """All that are there, readable or not, in order."""
        return sorted({*self.entries, *self.problems})

    def rebuild(self, version: int) -> dict[str, Buffer]:
        """The buffers of `version`, whose hash is the one that was written with it.

        Raises:
            DeltaChainError: it is not in the chain, or a file that leads to it is missing or damaged.
        """
        buffers: dict[str, Buffer] | None = None
        for entry in self.path_to(version):
            try:
                buffers = _apply(entry, buffers)
            except DeltaError as error:
                raise DeltaChainError(self._cannot(version, entry.path.name, str(error))) from error
        assert buffers is not None  # the path begins with a snapshot
        return buffers

    def path_to(self, version: int) -> list[Entry]:
        """The files that lead to `version`, a snapshot first. `DeltaChainError` names the one that is missing."""
        if version not in self.versions:
            raise DeltaChainError(f"Version {version} is not in {self.folder}: {self._nearby(version)}.")
        path: list[Entry] = []
        wanted = version
        while True:
            entry = self.entries.get(wanted)
            if entry is None:
                problem = self.problems.get(wanted)
                name, reason = (problem.file, problem.reason) if problem else (f"{wanted:06d}.delta", "it is missing")
                raise DeltaChainError(self._cannot(version, name, reason))
            if path and path[-1].header.delta.base != entry.hash:
                raise DeltaChainError(self._cannot(version, path[-1].path.name, _other_base(path[-1], entry)))
            path.append(entry)
            if entry.is_snapshot:
                return path[::-1]
            assert entry.place.before is not None  # `_entry` has checked it
            wanted = entry.place.before

    def walk(self, *, problems: list[ChainFault] | None = None, in_place: bool = True) -> Iterator[Step]:
        """Each version that can be rebuilt, in order; what cannot is added to `problems`, or raised without them.

        Args:
            in_place: the buffers of a step are valid until the next one.
        """
        buffers: dict[str, Buffer] | None = None
        last: Entry | None = None  # that `buffers` are of
        told: list[ChainFault] = []
        for version in self.versions:
            problem = self.problems.get(version)
            if problem is None:
                entry = self.entries[version]
                reason = self._misplaced(entry, last, told)
                if reason is None:
                    try:
                        delta = entry.load()
                        start = None if entry.is_snapshot else buffers
                        known = None if entry.is_snapshot or last is None else last.hash
                        buffers, last = apply(delta, start, in_place=in_place, known=known), entry
                        yield Step(entry, delta, buffers)
                        continue
                    except DeltaError as error:
                        reason = str(error)
                problem = ChainFault(version, entry.path.name, reason)
            if problems is None:
                raise DeltaChainError(f"{self.folder / problem.file} cannot be used: {problem.reason}")
            buffers = last = None
            told.append(problem)
            problems.append(problem)

    def verify(self) -> Verdict:
        """Rebuild each version, and say which cannot be."""
        problems: list[ChainFault] = []
        versions = [step.entry.version for step in self.walk(problems=problems)]
        problems += self._missing()
        return Verdict(versions, sorted(problems, key=lambda problem: problem.version))

    def _misplaced(self, entry: Entry, last: Entry | None, told: list[ChainFault]) -> str | None:
        if entry.is_snapshot:
            return None
        before = entry.place.before
        if before not in self.versions:
            return f"it starts from version {before}, whose file is missing"
        if last is None or last.version != before:
            branches = [other for other in self.entries.values() if other.place.before == before]
            if branches[0] is not entry and not any(problem.version == before for problem in told):
                return f"it starts from version {before}, as {branches[0].path.name} does: a chain has no branches"
            damaged = f" ({told[-1].file})" if told else ""
            return f"it starts from version {before}, which cannot be rebuilt{damaged}"
        return None if entry.header.delta.base == last.hash else _other_base(entry, last)

    def _missing(self) -> Iterator[ChainFault]:
        """Files that others name, where nothing else shows that they are gone."""
        first = max(min(self.versions, default=0), read_oldest(self.folder))
        for entry in self.entries.values():
            before = entry.place.before
            if entry.is_snapshot and before is not None and before > first and before not in self.versions:
                yield ChainFault(before, f"{before:06d}.delta", "it is missing: the snapshot after it names it")
        newest = read_latest(self.folder)
        if newest is not None and newest not in self.versions:
            yield ChainFault(newest, f"{newest:06d}.delta", f"it is missing: the file {LATEST} names it")

    def _entry(self, path: Path, version: int, kind: str) -> Entry:
        with _opened(path) as found:
            header = file.read_header(found)
            nbytes = os.fstat(found.fileno()).st_size
        try:
            entry = Entry(path, shaped(VersionPlace, header.about), header)
        except BadFileError as error:
            raise DeltaError(f"its header makes no sense ({error})") from error
        if entry.place.chain != self.about.chain:
            raise DeltaError(f"it belongs to another chain ({entry.place.chain}; this one is {self.about.chain})")
        if entry.version != version or entry.is_snapshot != (kind == "full"):
            what = f"{entry.version:06d}.{'full' if entry.is_snapshot else 'delta'}"
            raise DeltaError(f"it holds {what}: it was renamed or swapped")
        if not entry.is_snapshot and (entry.place.before is None or entry.place.before >= version):
            raise DeltaError(f"it starts from version {entry.place.before}, which does not come before it")
        if nbytes != header.file_bytes:
            raise DeltaError(f"it has {nbytes:,} bytes instead of {header.file_bytes:,}: it is cut off, or no delta")
        return entry

    def _set_aside_other_models(self) -> None:
        """Files that claim other tensors than most of them do: nothing of that size is allocated."""
        tensors = {version: _tensors(entry) for version, entry in self.entries.items()}
        ours = Counter(tensors.values()).most_common(1)[0][0] if tensors else frozenset()
        for version in [version for version, found in tensors.items() if found != ours]:
            name, kind = min(tensors[version] - ours or ours - tensors[version])
            reason = f"it has other tensors than the chain's model, such as {name} of {kind}"
            self.problems[version] = ChainFault(version, self.entries.pop(version).path.name, reason)

    def _nearby(self, version: int) -> str:
        if not self.versions:
            return "the folder has no version yet"
        lower = max((known for known in self.versions if known < version), default=None)
        higher = min((known for known in self.versions if known > version), default=None)
        known = " and ".join(str(known) for known in (lower, higher) if known is not None)
        return f"it has {counted(len(self.versions), 'version')}, of which {known} are the nearest"

    def _cannot(self, version: int, name: str, reason: str) -> str:
        return (
            f"Version {version} cannot be rebuilt from {self.folder}: {name}: {reason.rstrip('.')}. `async-grpo delta "
            "verify` says which versions can be."
        )


def read_about(folder: Path) -> About:
    """`DeltaChainError` where `folder` holds no chain."""
    try:
        found = read_object(folder / CHAIN_FILE)
        with naming(folder / CHAIN_FILE):
            about = shaped(About, found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DeltaChainError(
            f"{folder} holds no chain of deltas: it has no {CHAIN_FILE}. `train --delta-every 1` writes one."
        ) from error
    except BadFileError as error:
        raise DeltaChainError(str(error)) from error
    if about.format != FORMAT:
        raise DeltaChainError(f"{folder} has the format {about.format}, and this version reads {FORMAT}.")
    return about


def read_latest(folder: Path) -> int | None:
    """The version that `latest` names; None where it names none."""
    return _in_latest(folder, "version")


def read_oldest(folder: Path) -> int:
    """The version from which on all are kept: older ones are deleted, or were to be when the writer was killed."""
    return _in_latest(folder, "oldest") or 0


def _in_latest(folder: Path, name: str) -> int | None:
    try:
        version = read_object(folder / LATEST).get(name)
    except (FileNotFoundError, BadFileError):
        return None
    return version if type(version) is int else None  # True is an int, too


def _apply(entry: Entry, buffers: dict[str, Buffer] | None) -> dict[str, Buffer]:
    delta = entry.load()  # its base was compared with the hash of the version before it
    return apply(delta, buffers, in_place=True, known=None if buffers is None else delta.base)


def _tensors(entry: Entry) -> frozenset[tuple[str, str]]:
    """Name and kind of each."""
    return frozenset((part.name, f"{part.dtype} {list(part.shape)}") for part in entry.header.delta.parts)


def _other_base(entry: Entry, before: Entry) -> str:
    return (
        f"it starts from other weights than version {before.version} has (hash {entry.header.delta.base}, there "
        f"{before.hash})"
    )


def _files(folder: Path) -> list[tuple[Path, int, str]]:
    found = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    by_version: dict[int, tuple[Path, int, str]] = {}
    for path, match in sorted((path, match) for path, match in found if match):
        by_version.setdefault(int(match[1]), (path, int(match[1]), match[2]))
    return [by_version[version] for version in sorted(by_version)]


def _opened(path: Path) -> Any:
    try:
        return os.fdopen(open_plain(path), "rb")
    except FileNotFoundError as error:
        raise DeltaError("it is missing") from error
    except BadFileError as error:
        raise DeltaError(str(error)) from error
