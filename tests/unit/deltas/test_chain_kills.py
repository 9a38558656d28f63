"""A writer that is killed at any moment leaves a chain that verifies, short of at most its newest version."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from delta_chains import ABOUT, equal, weights, write_chain

from async_grpo.deltas.chain import Chain, read_latest
from async_grpo.deltas.writer import ChainWriter

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
