"""A folder of versions: `000000.full`, `000001.delta`, `000002.delta`, …, and reading it back.

    chain.json        what the versions are of: chain id, run, kind, tensors; written once
    model/            configuration and tokenizer, for a rebuilt checkpoint
    000000.full       a snapshot of version 0: needs no other file
    000001.delta      from the version before it in the folder to version 1
    latest            the newest version, and the oldest that is kept; moved when the newest is whole on the disk
    superseded-1/     versions that a resumed run has trained again
    writer.lock       kernel lock: one writer at a time

Each file names its chain, its version, the version it starts from, and the hash of the weights before and after. So one
that was renamed, swapped or comes from elsewhere is noticed, and nothing is rebuilt wrongly.
"""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from async_grpo.deltas.coding import DeltaError
from async_grpo.deltas.delta import Delta, DeltaHeader, Weights, apply, read, read_header, require_memory
from async_grpo.errors import AsyncGRPOError, BadFileError, DeltaChainError
from async_grpo.formatting import counted
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import naming, open_plain, read_object
from async_grpo.rundir.shape import read_shaped, shaped

FORMAT = "async-grpo-deltas/2"
CHAIN_FILE, LATEST, MODEL = "chain.json", "latest", "model"
FULL_EVERY = 100  # of the kept versions, one in so many is a snapshot
_NAME = re.compile(r"(\d{6,})\.(full|delta)")
_AT = re.compile(r"(.+)@(\d+)")


@dataclass(frozen=True, slots=True)
class TensorKind:
    """What a tensor is in every version of a chain."""

    dtype: str  # as torch names it
    item: int  # bytes of an element
    shape: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What `chain.json` says."""

    chain: str
    run_id: str
    kind: str = "model"  # or "adapter"
    frozen: str | None = None  # the hash of the weights that an adapter belongs to
    names: dict[str, str] = field(default_factory=dict)  # published name -> name in a checkpoint, where they differ
    tensors: dict[str, TensorKind]
    format: str = FORMAT


@dataclass(frozen=True, slots=True)
class Latest:
    """What the file `latest` says."""

    version: int | None = None
    oldest: int = 0  # version from which on all are kept; older ones may be left of a writer that was killed


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the chain, of which the header could be read."""

    path: Path
    header: DeltaHeader
    nbytes: int

    def load(self) -> Delta:
        """`DeltaError` gives the reason where the file is damaged."""
        with _opened(self.path) as file:
            return read(file.fileno())


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
        named = ((_NAME.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
        self.files = {int(match[1]): path for match, path in named if match}
        self.entries: dict[int, Entry] = {}
        self.problems: dict[int, ChainFault] = {}
        for version, path in self.files.items():
            try:
                self.entries[version] = self._entry(path)
            except DeltaError as error:
                self.problems[version] = ChainFault(version, path.name, str(error))

    @property
    def versions(self) -> list[int]:
        """All that are there, readable or not, in order."""
        return sorted(self.files)

    def rebuild(self, version: int) -> Weights:
        """The weights of `version`, whose hash is the one that was written with it.

        Raises:
            DeltaChainError: it is not in the chain, or a file that leads to it is missing or damaged.
        """
        weights: Weights = {}
        for entry in self.path_to(version):
            try:
                weights = self._next(entry, weights, known=entry.header.base)
            except DeltaError as error:
                raise self._cannot(version, entry.path.name, str(error)) from error
        return weights

    def path_to(self, version: int) -> list[Entry]:
        """The files that lead to `version`, a snapshot first. `DeltaChainError` names the one that is missing."""
        if version not in self.files:
            raise DeltaChainError(f"Version {version} is not in {self.folder}: {self._nearby(version)}.")
        path: list[Entry] = []
        wanted: int | None = version
        while wanted is not None:
            entry = self.entries.get(wanted)
            if entry is None:
                fault = self.problems.get(wanted) or ChainFault(wanted, f"{wanted:06d}.delta", "it is missing")
                raise self._cannot(version, fault.file, fault.reason)
            if path and path[-1].header.base != entry.header.result:
                raise self._cannot(version, path[-1].path.name, f"it starts from other weights than {entry.path.name}")
            path.append(entry)
            wanted = None if entry.header.is_snapshot else entry.header.before
        return path[::-1]

    def walk(self, problems: list[ChainFault]) -> Iterator[tuple[Entry, Weights]]:
        """Each version that can be rebuilt, in order; what cannot is added to `problems`.

        The weights of a version are valid until the next one.
        """
        weights: Weights = {}
        last: Entry | None = None  # that `weights` are of
        for version in self.versions:
            fault = self.problems.get(version)
            if fault is None:
                entry = self.entries[version]
                try:
                    self._require_base(entry, last)
                    weights = self._next(entry, weights, known="" if last is None else last.header.result)
                    last = entry
                except DeltaError as error:
                    fault = ChainFault(version, entry.path.name, str(error))
            if fault is None:
                yield entry, weights
            else:
                last = None
                problems.append(fault)

    def verify(self) -> Verdict:
        """Rebuild each version, and say which cannot be."""
        problems: list[ChainFault] = []
        versions = [entry.header.version for entry, _ in self.walk(problems)]
        problems += self._missing()
        return Verdict(versions, sorted(problems, key=lambda problem: problem.version))

    def _next(self, entry: Entry, weights: Weights, known: str | None) -> Weights:
        """The weights of `entry`, made of those of the version before it, whose digest is `known`."""
        delta = entry.load()
        weights = self._zeros() if entry.header.is_snapshot else weights
        apply(delta, weights, known=known)
        return weights

    def _zeros(self) -> Weights:
        """What a snapshot starts from."""
        kinds = self.about.tensors
        require_memory(sum(math.prod(kind.shape) * kind.item for kind in kinds.values()))
        try:
            return {name: np.zeros(kind.shape, f"<u{kind.item}") for name, kind in kinds.items()}
        except (ValueError, TypeError, MemoryError) as error:
            raise DeltaError(f"a tensor of {CHAIN_FILE} cannot be made ({error})") from error

    def _require_base(self, entry: Entry, last: Entry | None) -> None:
        before = entry.header.before
        if entry.header.is_snapshot or before is None:
            return
        if before not in self.files:
            raise DeltaError(f"it starts from version {before}, whose file is missing")
        if last is None:
            raise DeltaError(f"it starts from version {before}, which cannot be rebuilt ({self.files[before].name})")
        if last.header.version != before:
            raise DeltaError(f"it starts from version {before}, as {last.path.name} does: a chain has no branches")

    def _missing(self) -> Iterator[ChainFault]:
        """Files that others name, where nothing else shows that they are gone."""
        latest = read_latest(self.folder)
        first = max(min(self.files, default=0), latest.oldest)
        for entry in self.entries.values():
            before = entry.header.before
            if entry.header.is_snapshot and before is not None and before > first and before not in self.files:
                yield ChainFault(before, f"{before:06d}.delta", "it is missing: the snapshot after it names it")
        newest = latest.version
        if newest is not None and newest not in self.files:
            yield ChainFault(newest, f"{newest:06d}.delta", f"it is missing: the file {LATEST} names it")

    def _entry(self, path: Path) -> Entry:
        with _opened(path) as file:
            entry = Entry(path, read_header(file.fileno()), os.fstat(file.fileno()).st_size)
        header = entry.header
        if header.chain != self.about.chain:
            raise DeltaError(f"it belongs to another chain ({header.chain}; this one is {self.about.chain})")
        if path.name != (name := file_name(header)):
            raise DeltaError(f"it holds {name}: it was renamed or swapped")
        if not header.is_snapshot and (header.before is None or header.before >= header.version):
            raise DeltaError(f"it starts from version {header.before}, which does not come before it")
        return entry

    def _nearby(self, version: int) -> str:
        if not self.files:
            return "the folder has no version yet"
        nearest = min(self.files, key=lambda known: abs(known - version))
        return f"it has {counted(len(self.files), 'version')}, of which {nearest} is the nearest"

    def _cannot(self, version: int, name: str, reason: str) -> DeltaChainError:
        return DeltaChainError(
            f"Version {version} cannot be rebuilt from {self.folder}: {name}: {reason.rstrip('.')}. `async-grpo delta "
            "verify` says which versions can be."
        )


def file_name(header: DeltaHeader) -> str:
    return f"{header.version:06d}.{'full' if header.is_snapshot else 'delta'}"


def read_about(folder: Path) -> About:
    """`DeltaChainError` where `folder` holds no chain."""
    try:
        found = read_object(folder / CHAIN_FILE)
        if found.get("format") not in (None, FORMAT):
            raise DeltaChainError(
                f"{folder} has the format {found['format']}, and this release reads {FORMAT}. Rebuild its versions "
                "with the release that wrote them, or choose another --delta-dir."
            )
        with naming(folder / CHAIN_FILE):
            return shaped(About, found)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DeltaChainError(
            f"{folder} holds no chain of deltas: it has no {CHAIN_FILE}. `train --delta-every 1` writes one."
        ) from error
    except BadFileError as error:
        raise DeltaChainError(str(error)) from error


def read_latest(folder: Path) -> Latest:
    """What the file `latest` says; nothing where it cannot be read."""
    return read_shaped(Latest, folder / LATEST) or Latest()


def _opened(path: Path) -> BinaryIO:
    try:
        return os.fdopen(open_plain(path), "rb")
    except FileNotFoundError as error:
        raise DeltaError("it is missing") from error
    except BadFileError as error:
        raise DeltaError(str(error)) from error


class NamedVersion(NamedTuple):
    """What `RUN_DIR@VERSION` says."""

    folder: Path  # of the chain
    version: int


def chain_folder(path: Path) -> Path:
    """The chain in `path`, or of the run in it. `DeltaChainError` where there is none."""
    if (path / CHAIN_FILE).exists():
        return path
    state = RunDir(path).read_state() if path.is_dir() else None
    if state is None:
        raise DeltaChainError(f"{path} is neither a chain of deltas nor a run directory.")
    if not state.delta_dir:
        raise DeltaChainError(
            f"The run in {path} kept no versions. `train --delta-every 1` keeps them; its checkpoints are in "
            f"{state.output_dir or 'output_dir of the setup file'}."
        )
    folder = Path(state.delta_dir)
    if not (folder / CHAIN_FILE).exists():
        raise DeltaChainError(f"The run in {path} kept its versions in {folder}, where no chain is: was it moved?")
    return folder


def named_version(text: str) -> NamedVersion | None:
    """`worker@137` -> the chain and 137; None where `text` names no version. `DeltaChainError` as `chain_folder`."""
    match = _AT.fullmatch(text)
    if match is None or Path(text).exists() or not Path(match[1]).expanduser().is_dir():
        return None
    return NamedVersion(chain_folder(Path(match[1]).expanduser()).absolute(), int(match[2]))


def kept_of(run_dir: Path, versions: Iterable[int]) -> str:
    """How to load the policy versions that sampled some groups; empty where the run has not kept them."""
    try:
        kept = {*Chain(chain_folder(run_dir)).versions} & {*versions}
    except (AsyncGRPOError, OSError):
        return ""
    if not kept:
        return ""
    which = f"version {max(kept)}," if len(kept) == 1 else f"{len(kept)} versions, {min(kept)} to {max(kept)},"
    verb = "is" if len(kept) == 1 else "are"
    newest = shlex.quote(f"{run_dir}@{max(kept)}")
    return f"sampled by {which} which {verb} kept: async-grpo evaluate {newest} --config SETUP_FILE"


def require_version(named: NamedVersion) -> None:
    """`DeltaChainError` where the version is not there, or the files that lead to it are not."""
    Chain(named.folder).path_to(named.version)
