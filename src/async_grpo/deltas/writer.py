"""Appends versions to a chain: a file is whole on the disk before `latest` names it, whatever kills the writer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from async_grpo.deltas.chain import CHAIN_FILE, LATEST, About, Chain, Entry, VersionPlace, read_about, read_oldest
from async_grpo.errors import DeltaChainError, DiskFullError
from async_grpo.rundir.files import room_for, sync, write_json
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock, describe_holder
from async_grpo_ipc.delta import Buffer, DeltaError, digest, encode, file

LOCK = "writer.lock"
FULL_EVERY = 100  # of the kept versions, one in so many is a snapshot
_TEMPORARY = ".writing-"


class Written(NamedTuple):
    """One file that was appended."""

    version: int
    is_snapshot: bool
    span: int  # versions since the one before it in the chain
    nbytes: int
    changed: int  # elements
    size: int  # elements


class ChainWriter:
    """Appends to the chain in `folder`; one at a time, which a kernel lock guarantees.

    Args:
        about: what the versions are of. A folder that holds another run's chain is refused.
        keep: at least so many of the newest versions stay; None: all.

    Raises:
        DeltaChainError: another process writes there, or the chain is another run's.
    """

    def __init__(self, folder: Path, about: About, *, keep: int | None = None) -> None:
        self.folder = make_folder(folder)
        self._keep = keep
        self._last: dict[str, Buffer] | None = None  # what the next delta starts from
        self._last_version: int | None = None
        self._last_hash = ""
        self._since_full = 0
        self._oldest = read_oldest(folder)  # what is older is being deleted
        self._lock = KernelLock(folder / LOCK)
        if not self._lock.try_acquire({"role": "delta writer"}):
            holder = describe_holder(self._lock.holder())
            raise DeltaChainError(f"{folder} is written by {holder}. Choose another --delta-dir, or wait for it.")
        try:
            self.about = self._begin(about)
        except BaseException:
            self._lock.release()
            raise

    def begin(self, version: int, buffers: dict[str, Buffer]) -> Written | None:
        """Take `version` as what the chain goes on from; returns None where the chain has it already.

        Later versions, which the run will train again, are set aside. So is what differs.
        """
        chain = Chain(self.folder)
        found = digest(buffers)
        known = _reachable(chain, version)
        goes_on = known is not None and known.hash == found
        self._set_aside(chain, [v for v in chain.versions if v > version or (v == version and not goes_on)])
        if known is None or not goes_on:
            return self._append(version, buffers, snapshot=True)
        self._last, self._last_version, self._last_hash = buffers, version, found
        self._since_full = len(chain.path_to(version)) - 1
        self._point(version, known.path.name, found)
        return None

    def append(self, version: int, buffers: dict[str, Buffer]) -> Written:
        """Write `version` after the last one. The writer keeps `buffers`; the caller must not change them any more.

        Raises:
            DiskFullError: nothing was written, and the next version becomes a snapshot.
            DeltaError: a tensor has appeared, vanished or changed its form.
        """
        due = self._last is None or self._since_full + 1 >= FULL_EVERY
        return self._append(version, buffers, snapshot=due)

    def close(self) -> None:
        self._lock.release()

    def _begin(self, about: About) -> About:
        for path in self.folder.glob(f"{_TEMPORARY}*"):  # of a writer that was killed
            path.unlink(missing_ok=True)
        if not (self.folder / CHAIN_FILE).exists():
            write_json(self.folder / CHAIN_FILE, asdict(about))
            return about
        known = read_about(self.folder)
        if (known.run_id, known.kind, known.frozen) != (about.run_id, about.kind, about.frozen):
            what = "of another base" if known.run_id == about.run_id else f"of run {known.run_id}"
            raise DeltaChainError(
                f"{self.folder} holds the chain {what}; this run is {about.run_id}. Choose another --delta-dir."
            )
        return known

    def _append(self, version: int, buffers: dict[str, Buffer], *, snapshot: bool) -> Written:
        if self._last_version is not None and version <= self._last_version:
            raise DeltaChainError(f"Version {version} cannot follow version {self._last_version} in {self.folder}.")
        delta = encode(None if snapshot else self._last, buffers, base=self._last_hash)
        before = self._last_version
        span = version - before if before is not None else 1
        place = VersionPlace(chain=self.about.chain, version=version, before=before, span=span)
        name = f"{version:06d}.{'full' if snapshot else 'delta'}"
        try:
            nbytes = self._write(name, file.pack(delta, asdict(place)))
        except DiskFullError:
            self._last = None
            raise
        self._last, self._last_version, self._last_hash = buffers, version, delta.result
        self._since_full = 0 if snapshot else self._since_full + 1
        old = self._old(self._keep) if snapshot and self._keep is not None else []
        self._point(version, name, delta.result)  # says from where on versions are kept, before any is deleted
        for path in old:
            path.unlink(missing_ok=True)
        return Written(version, snapshot, span, nbytes, delta.changed, delta.size)

    def _point(self, version: int, name: str, found: str) -> None:
        text = json.dumps({"version": version, "file": name, "hash": found, "oldest": self._oldest}) + "\n"
        with suppress(DiskFullError):  # the version itself is on the disk, and nothing is rebuilt by this file
            self._write(LATEST, [text.encode()])

    def _write(self, name: str, pieces: Iterable[bytes]) -> int:
        """Write a file that is whole on the disk before it has its name; returns its bytes."""
        temporary = self.folder / f"{_TEMPORARY}{uuid4().hex}"
        try:
            with room_for(self.folder / name):
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as stream:
                    for piece in pieces:
                        stream.write(piece)
                    stream.flush()
                    os.fsync(stream.fileno())
                    nbytes = stream.tell()
                temporary.replace(self.folder / name)
                if name != LATEST:  # an older one is still true after a power cut
                    sync(self.folder)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        return nbytes

    def _set_aside(self, chain: Chain, versions: list[int]) -> None:
        """The newest first: whenever this is killed, what is left is a chain."""
        if not versions:
            return
        (self.folder / LATEST).unlink(missing_ok=True)
        aside = next(path for n in count(1) if not (path := self.folder / f"superseded-{n}").exists())
        aside.mkdir(mode=0o700)
        for version in reversed(versions):
            self._path_of(chain, version).rename(aside / self._path_of(chain, version).name)
        sync(self.folder)

    def _old(self, keep: int) -> list[Path]:
        """The files before a snapshot from which at least `keep` versions can be rebuilt, the newest first."""
        chain = Chain(self.folder)
        snapshots = [version for version, entry in chain.entries.items() if entry.is_snapshot]
        enough: Callable[[int], bool] = lambda start: sum(v >= start for v in chain.versions) >= keep  # noqa: E731
        self._oldest = max((version for version in snapshots if enough(version)), default=self._oldest)
        return [self._path_of(chain, version) for version in reversed(chain.versions) if version < self._oldest]

    def _path_of(self, chain: Chain, version: int) -> Path:
        entry = chain.entries.get(version)
        return entry.path if entry is not None else self.folder / chain.problems[version].file


def _reachable(chain: Chain, version: int) -> Entry | None:
    """The entry of `version`, where all files that lead to it are there and whole."""
    try:
        path = chain.path_to(version)
        for entry in path:
            entry.load()
    except (DeltaChainError, DeltaError):
        return None
    return path[-1]
