"""A chain on disk: exact, resumable, and never a wrong version, whatever became of its files."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from delta_chains import ABOUT, equal, weights, write_chain

from async_grpo.deltas import writer as writer_module
from async_grpo.deltas.chain import LATEST, Chain, Latest, read_latest
from async_grpo.deltas.writer import ChainWriter
from async_grpo.errors import DeltaChainError, DiskFullError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Versions 0 to 9, of which 0, 4 and 8 are snapshots."""
    return write_chain(tmp_path / "chain", 9)


def snapshots(folder: Path) -> list[int]:
    return sorted(version for version, entry in Chain(folder).entries.items() if entry.header.is_snapshot)


def test_every_version_is_rebuilt(folder: Path) -> None:
    chain = Chain(folder)
    assert snapshots(folder) == [0, 4, 8]
    assert all(equal(chain.rebuild(version), weights(version)) for version in range(10))
    verdict = chain.verify()
    assert (verdict.versions, verdict.problems, verdict.intact_up_to) == (list(range(10)), [], 9)
    assert read_latest(folder) == Latest(9, 0)
    with pytest.raises(DeltaChainError, match=r"Version 12 is not in .*of which 9 is the nearest"):
        chain.rebuild(12)


def flip(folder: Path) -> None:
    path = folder / "000006.delta"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(folder: Path) -> None:
    path = folder / "000006.delta"
    path.write_bytes(path.read_bytes()[:-5])


def swap(folder: Path) -> None:
    first, second = (folder / f"00000{version}.delta" for version in (6, 7))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def foreign(folder: Path) -> None:
    other = write_chain(folder.parent / "other", 6, about=replace(ABOUT, chain="d" * 32))
    shutil.copy(other / "000006.delta", folder / "000006.delta")


def plant(folder: Path, file: str, versions: dict[int, dict[str, np.ndarray]]) -> None:
    """A file of the same chain that another writer wrote, of these versions."""
    writer = ChainWriter(folder.parent / "other", ABOUT)
    for number, (version, given) in enumerate(versions.items()):
        writer.append(version, given) if number else writer.begin(version, given)
    writer.close()
    shutil.copy(folder.parent / "other" / file, folder / file)


def another_base(folder: Path) -> None:
    """A delta of the same chain and version, from other weights: as two machines would write that share a folder."""
    plant(folder, "000006.delta", {version: weights(version, seed=1) for version in (5, 6)})


def link(folder: Path) -> None:
    path = folder / "000006.delta"
    path.rename(folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (flip, "000006.delta: it is damaged: the checksum differs"),
        (cut, "000006.delta: it is not a delta, or it is damaged or cut off"),
        (lambda folder: (folder / "000006.delta").unlink(), "000007.delta: it starts from version 6, whose file is"),
        (swap, r"000006.delta: it holds 000007.delta: it was renamed or swapped"),
        (lambda folder: (folder / "000006.delta").rename(folder / "000011.delta"), "000011.delta: it holds 000006"),
        (foreign, "000006.delta: it belongs to another chain"),
        (another_base, "000006.delta: It starts from the version with the hash"),
        (link, "000006.delta: it is a link"),
    ],
)
def test_damage_is_named_and_the_rest_rebuilds(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    chain = Chain(folder)
    verdict = chain.verify()
    assert verdict.intact_up_to == 5
    assert verdict.versions == [0, 1, 2, 3, 4, 5, 8, 9]  # again from the snapshot on
    assert any(re.match(said, str(problem)) for problem in verdict.problems), verdict.problems
    assert all(equal(chain.rebuild(version), weights(version)) for version in verdict.versions)
    for version in {*chain.versions, 6, 7} - {*verdict.versions}:
        with pytest.raises(DeltaChainError):
            chain.rebuild(version)


def test_a_snapshot_of_another_model_is_not_decompressed(folder: Path) -> None:
    """What it claims may be gigabytes."""
    plant(folder, "000004.full", {4: {"w": np.zeros(4000, np.uint8) + 1}})
    chain = Chain(folder)
    with pytest.raises(DeltaChainError, match=r"000004.full: It has a tensor w, and the chain's model has none"):
        chain.rebuild(4)
    assert chain.verify().versions == [0, 1, 2, 3, 8, 9]


@pytest.mark.parametrize(
    ("shape", "said"), [([1 << 40], "of memory are free"), ([-1], "cannot be made"), ([20, 20, 1], "instead of")]
)
def test_tensors_that_cannot_be_are_not_made(folder: Path, shape: list[int], said: str) -> None:
    about = json.loads((folder / "chain.json").read_text())
    about["tensors"]["model.layers.0.self_attn.q_proj.weight"]["shape"] = shape
    (folder / "chain.json").write_text(json.dumps(about))
    with pytest.raises(DeltaChainError, match=said):
        Chain(folder).rebuild(0)


def test_two_files_that_start_from_one_version_are_named(folder: Path) -> None:
    plant(folder, "000003.delta", {version: weights(version) for version in (1, 3)})
    [problem] = Chain(folder).verify().problems
    assert str(problem) == "000003.delta: it starts from version 1, as 000002.delta does: a chain has no branches"


def test_true_is_no_version(folder: Path) -> None:
    (folder / LATEST).write_text('{"version": true, "oldest": true}')
    assert read_latest(folder) == Latest()


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    writer, replace = ChainWriter(tmp_path / "chain", ABOUT), Path.replace
    writer.begin(0, weights(0))

    def synced(fd: int) -> None:
        events.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name.split('-')[0]}")

    def named(path: Path, target: Path) -> Path:
        events.append(f"name {target.name}")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", named)
    writer.append(1, weights(1))
    writer.close()
    assert events == ["sync .writing", "name 000001.delta", "sync chain", "sync .writing", "name latest"]


def test_what_no_other_file_shows_to_be_missing(folder: Path) -> None:
    (folder / "000003.delta").unlink()  # the next one is a snapshot
    (folder / "000009.delta").unlink()  # the newest
    assert [problem.version for problem in Chain(folder).verify().problems] == [3, 9]


@pytest.mark.parametrize("apart", [211, pytest.param(11, marks=pytest.mark.slow)])
def test_each_byte_of_each_file_that_flips_makes_no_wrong_version(tmp_path: Path, apart: int) -> None:
    folder = write_chain(tmp_path / "chain", 2)
    for path in sorted(folder.glob("0*")):
        data = path.read_bytes()
        for at in range(0, len(data), apart):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            verdict = Chain(folder).verify()
            assert verdict.problems and verdict.versions == list(range(int(path.stem)))
        path.write_bytes(data)
    assert not Chain(folder).verify().problems


def test_a_resumed_run_goes_on_and_sets_aside_what_it_trains_again(folder: Path) -> None:
    writer = ChainWriter(folder, ABOUT)
    assert writer.begin(6, weights(6)) is None  # it is there already
    assert read_latest(folder).version == 6
    writer.append(7, weights(7, seed=5))
    writer.close()
    chain = Chain(folder)
    assert (chain.versions, snapshots(folder)) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 4])
    assert equal(chain.rebuild(7), weights(7, seed=5)) and not chain.verify().problems
    set_aside = {path.name for path in (folder / "superseded-1").iterdir()}
    assert set_aside == {"000007.delta", "000008.full", "000009.delta"}


def damage_the_body(folder: Path) -> None:
    """The header is whole."""
    data = bytearray((folder / "000005.delta").read_bytes())
    data[-3] ^= 1
    (folder / "000005.delta").write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "seed"),
    [(damage_the_body, 0), (lambda folder: (folder / "000005.delta").unlink(), 0), (lambda folder: None, 2)],
)
def test_what_a_resume_cannot_go_on_from_is_followed_by_a_snapshot(
    folder: Path, damage: Callable[[Path], None], seed: int
) -> None:
    """The weights differ from those of the chain, or the chain does not lead there."""
    damage(folder)
    writer = ChainWriter(folder, ABOUT)
    written = writer.begin(7, weights(7, seed=seed))
    assert written is not None and written.header.is_snapshot
    writer.append(8, weights(8, seed=seed))
    writer.close()
    assert equal(Chain(folder).rebuild(8), weights(8, seed=seed))


def test_versions_that_were_left_out_are_spanned(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "chain", ABOUT)
    writer.begin(0, weights(0))
    assert writer.append(3, weights(3)).header.span == 3
    with pytest.raises(DeltaChainError, match="Version 3 cannot follow version 3"):
        writer.append(3, weights(3))
    writer.close()
    assert equal(Chain(tmp_path / "chain").rebuild(3), weights(3))


def test_retention_keeps_whole_pieces_of_the_chain(tmp_path: Path) -> None:
    chain = Chain(write_chain(tmp_path / "chain", 23, keep=6))
    assert chain.versions == list(range(12, 24))  # at 20, only the snapshot at 12 has six versions after it
    assert not chain.verify().problems
    assert all(equal(chain.rebuild(version), weights(version)) for version in chain.versions)


def test_retention_that_is_killed_leaves_a_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def killed_after_one(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.suffix in (".full", ".delta"):
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "unlink", killed_after_one)
    with pytest.raises(KeyboardInterrupt):
        write_chain(tmp_path / "chain", 9, keep=3)
    monkeypatch.undo()
    chain = Chain(tmp_path / "chain")
    assert 0 in chain.versions and 3 not in chain.versions and not chain.verify().problems


def test_no_room_for_the_name_of_the_newest_version_loses_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ChainWriter(tmp_path / "chain", ABOUT)
    writer.begin(0, weights(0))
    write = ChainWriter._write

    def no_room(self: ChainWriter, name: str, pieces: Iterable[bytes]) -> int:
        if name == LATEST:
            raise DiskFullError("The disk is full.")
        return write(self, name, pieces)

    with monkeypatch.context() as full:
        full.setattr(ChainWriter, "_write", no_room)
        assert not writer.append(1, weights(1)).header.is_snapshot
    writer.append(2, weights(2))
    writer.close()
    assert Chain(tmp_path / "chain").verify().versions == [0, 1, 2]


def test_a_full_disk_leaves_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "chain"
    writer = ChainWriter(folder, ABOUT)
    writer.begin(0, weights(0))
    writer.append(1, weights(1))

    with monkeypatch.context() as full:
        full.setattr(writer_module.os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(DiskFullError):
            writer.append(2, weights(2))
    assert sorted(path.name for path in folder.glob("*0*")) == ["000000.full", "000001.delta"]
    written = writer.append(3, weights(3))
    writer.close()
    assert written.header.is_snapshot and written.header.span == 2
    chain = Chain(folder)
    assert chain.verify().versions == [0, 1, 3] and not chain.verify().problems
    assert not list(folder.glob(".writing*"))


def test_two_writers_exclude_each_other(folder: Path) -> None:
    writer = ChainWriter(folder, ABOUT)
    with pytest.raises(DeltaChainError, match=f"is written by process {os.getpid()}"):
        ChainWriter(folder, ABOUT)
    writer.close()
    ChainWriter(folder, ABOUT).close()


@pytest.mark.parametrize(
    ("about", "said"),
    [
        (replace(ABOUT, run_id="run-2"), "holds the chain of run run-1; this run is run-2"),
        (replace(ABOUT, kind="adapter", frozen="0" * 32), "of another base or model"),
    ],
)
def test_the_chain_of_another_run_or_base_is_refused(folder: Path, about: object, said: str) -> None:
    with pytest.raises(DeltaChainError, match=said):
        ChainWriter(folder, about)  # type: ignore[arg-type]


def test_a_folder_without_a_chain_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeltaChainError, match="holds no chain of deltas"):
        Chain(tmp_path)
    for found, said in (({"chain": 3}, "cannot be used"), ({"format": "async-grpo-deltas/1"}, "choose another")):
        (tmp_path / "chain.json").write_text(json.dumps(found))
        with pytest.raises(DeltaChainError, match=said):
            Chain(tmp_path)


# --- A writer that is killed at any moment leaves a chain that verifies, short of at most its newest version -----

KEEP = 12


def write_until_killed(folder: Path, begin: int, told: int) -> None:
    """In a child: append versions, and tell each through the pipe `told` when `append` has returned."""
    os.write(told, b"\n")
    writer = ChainWriter(folder, ABOUT, keep=KEEP)
    writer.begin(begin, weights(begin % 50))
    version = begin
    while True:
        version += 1
        writer.append(version, weights(version % 50))
        os.write(told, f"{version}\n".encode())


def one_kill(folder: Path, begin: int, after_s: float) -> int:
    """Start a writer at version `begin`, kill it; returns the last version that it said was written."""
    reading, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_until_killed(folder, begin, telling)
        finally:
            os._exit(1)
    os.close(telling)
    os.read(reading, 1)  # it has begun
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the writer ended by itself"
    with os.fdopen(reading, "rb") as said:
        return max(map(int, said.read().split()), default=begin)


def kill_often(folder: Path, times: int) -> None:
    write_chain(folder, 1)
    rng = random.Random(7)
    begin = 0
    for _ in range(times):
        told = one_kill(folder, begin, rng.uniform(0, 0.02))
        chain = Chain(folder)
        verdict = chain.verify()
        assert not verdict.problems, verdict.problems
        assert chain.versions[-1] in (told, told + 1) or (told == begin and chain.versions[-1] > begin)
        assert equal(chain.rebuild(chain.versions[-1]), weights(chain.versions[-1] % 50))
        newest = read_latest(folder).version
        assert newest is None or newest in (chain.versions[-1], chain.versions[-1] - 1)
        # Half of the time a resume goes back to an older version, as to a checkpoint.
        begin = rng.choice([chain.versions[-1], rng.choice(chain.versions)])


def test_some_kills_of_the_writer(tmp_path: Path) -> None:
    kill_often(tmp_path / "chain", 5)


@pytest.mark.slow
def test_200_kills_of_the_writer(tmp_path: Path) -> None:
    kill_often(tmp_path / "chain", 200)
