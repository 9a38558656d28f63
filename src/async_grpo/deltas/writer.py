"""Appends versions to a chain: a file is whole on the disk before `latest` names it, whatever kills the writer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from async_grpo.deltas.chain import (
    CHAIN_FILE,
    FULL_EVERY,
    LATEST,
    About,
    Chain,
    Entry,
    Latest,
    file_name,
    read_about,
    read_latest,
)
from async_grpo.deltas.coding import DeltaError, Frame
from async_grpo.deltas.delta import Delta, DeltaHeader, Weights, digest, encode, pack
from async_grpo.errors import DeltaChainError, DiskFullError
from async_grpo.rundir.files import space_for, sync, write_json
from async_grpo.rundir.folders import make_folder
from async_grpo.rundir.locks import KernelLock, describe_holder

LOCK = "writer.lock"
_TEMPORARY = ".writing-"


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
        self._weights: Weights | None = None  # what the next delta starts from; None: it becomes a snapshot
        self._last: DeltaHeader | None = None
        self._since_full = 0
        self._oldest = read_latest(folder).oldest  # what is older is being deleted
        self._lock = KernelLock(folder / LOCK)
        if not self._lock.try_acquire({"role": "delta writer"}):
            holder = describe_holder(self._lock.holder())
            raise DeltaChainError(f"{folder} is written by {holder}. Choose another --delta-dir, or wait for it.")
        try:
            self.about = self._begin(about)
        except BaseException:
            self._lock.release()
            raise

    def begin(self, version: int, weights: Weights) -> Entry | None:
        """Take `version` as what the chain goes on from; returns None where the chain has it already.

        Later versions, which the run will train again, are set aside. So is what differs.
        """
        chain = Chain(self.folder)
        path = _path_to(chain, version)
        goes_on = bool(path) and path[-1].header.result == digest(weights)
        self._set_aside(chain, [v for v in chain.versions if v > version or (v == version and not goes_on)])
        if not goes_on:
            return self.append(version, weights)
        self._weights, self._last, self._since_full = weights, path[-1].header, len(path) - 1
        self._point()
        return None

    def append(self, version: int, weights: Weights) -> Entry:
        """Write `version` after the last one. The writer keeps `weights`; the caller must not change them any more.

        Raises:
            DiskFullError: nothing was written, and the next version becomes a snapshot.
            DeltaError: a tensor has appeared, vanished or changed its form.
        """
        before = None if self._last is None else self._last.version
        if before is not None and version <= before:
            raise DeltaChainError(f"Version {version} cannot follow version {before} in {self.folder}.")
        old = self._weights if self._since_full + 1 < FULL_EVERY else None
        delta = encode(old, weights, base=None if self._last is None else self._last.result)
        header = replace(delta.header, chain=self.about.chain, version=version, before=before)
        path = self.folder / file_name(header)
        try:
            nbytes = self._write(path.name, pack(Delta(header, delta.frames)))
        except DiskFullError:
            self._weights = None
            raise
        self._weights, self._last = weights, header
        self._since_full = 0 if old is None else self._since_full + 1
        too_old = self._too_old(self._keep) if old is None and self._keep is not None else []
        self._point()  # says from where on versions are kept, before any is deleted
        for one in too_old:
            one.unlink(missing_ok=True)
        return Entry(path, header, nbytes)

    def close(self) -> None:
        self._lock.release()

    def _begin(self, about: About) -> About:
        for path in self.folder.glob(f"{_TEMPORARY}*"):  # of a writer that was killed
            path.unlink(missing_ok=True)
        if not (self.folder / CHAIN_FILE).exists():
            write_json(self.folder / CHAIN_FILE, asdict(about))
            return about
        known = read_about(self.folder)
        if known != replace(about, chain=known.chain):
            what = "of another base or model" if known.run_id == about.run_id else f"of run {known.run_id}"
            raise DeltaChainError(
                f"{self.folder} holds the chain {what}; this run is {about.run_id}. Choose another --delta-dir."
            )
        return known

    def _point(self) -> None:
        assert self._last is not None
        text = json.dumps(asdict(Latest(self._last.version, self._oldest)))
        with suppress(DiskFullError):  # the version itself is on the disk, and nothing is rebuilt by this file
            self._write(LATEST, [text.encode()])

    def _write(self, name: str, pieces: Iterable[Frame]) -> int:
        """Write a file that is whole on the disk before it has its name; returns its bytes."""
        temporary = self.folder / f"{_TEMPORARY}{uuid4().hex}"
        try:
            with space_for(self.folder / name):
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as stream:
                    stream.writelines(pieces)
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
            chain.files[version].rename(aside / chain.files[version].name)
        sync(self.folder)

    def _too_old(self, keep: int) -> list[Path]:
        """The files before a snapshot from which at least `keep` versions can be rebuilt, the newest first."""
        chain = Chain(self.folder)
        newest = chain.versions[-keep:]
        enough = [v for v, entry in chain.entries.items() if entry.header.is_snapshot and v <= newest[0]]
        self._oldest = max(enough, default=self._oldest) if len(newest) == keep else self._oldest
        return [chain.files[version] for version in reversed(chain.versions) if version < self._oldest]


def _path_to(chain: Chain, version: int) -> list[Entry]:
    """The files that lead to `version`; none where one is missing or damaged."""
    try:
        path = chain.path_to(version)
        for entry in path:
            entry.load()
    except (DeltaChainError, DeltaError):
        return []
    return path
