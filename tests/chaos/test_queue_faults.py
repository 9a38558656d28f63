"""The queue under faults. Each test runs a script of this folder in its own process, which kills and breaks things.

The scripts print the seed that they drew; `--seed` repeats a run. Slices of them run always, in full they are `slow`.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from queue_harness import Log, Trainer, claim_now, execute, replay
from queue_mutants import MUTANTS

import async_grpo
from async_grpo.queue import WorkerQueue

HERE = Path(__file__).parent
SOURCES = Path(async_grpo.__file__).parent
FOR_PEOPLE = "listing.py"  # tells the ages of files
QUEUE_MODULES = [
    *(path for path in (SOURCES / "queue").glob("*.py") if path.name != FOR_PEOPLE),
    SOURCES / "rundir" / "locks.py",
]
TMPFS = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A private folder in memory where there is one: the file system is not what is tested."""
    if not os.access(TMPFS, os.W_OK):
        yield tmp_path
        return
    import shutil
    import tempfile

    made = Path(tempfile.mkdtemp(prefix="queue-faults-", dir=TMPFS))
    yield made
    shutil.rmtree(made)


def run(folder: Path, script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> tuple[int, str]:
    command = [*prefix, sys.executable, str(HERE / script), "--root", str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    told = f"{script} {' '.join(map(str, arguments))}\n{done.stderr}{done.stdout}"
    print(told)
    return done.returncode, told


def must_pass(folder: Path, script: str, *arguments: object, prefix: tuple[str, ...] = ()) -> None:
    code, told = run(folder, script, *arguments, prefix=prefix)
    assert code == 0, told


def in_full(*arguments: object) -> Any:
    return pytest.param(arguments, id="in full", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize("size", [("--jobs", 800, "--kills", 80), in_full("--jobs", 10_000, "--kills", 1_000)])
def test_kill_loop(folder: Path, size: tuple[object, ...]) -> None:
    must_pass(folder, "queue_kill_loop.py", *size)


@pytest.mark.parametrize("size", [("--every", 50, "--worker-every", 4), in_full()])
def test_kill_at_every_operation(folder: Path, size: tuple[object, ...]) -> None:
    must_pass(folder, "queue_crash_points.py", *size)


@pytest.mark.parametrize("size", [("--every", 4), in_full()])
def test_power_loss(folder: Path, size: tuple[object, ...]) -> None:
    must_pass(folder, "queue_power_loss.py", *size)


# The same examples each time: what nobody changed cannot turn red. `make chaos` draws new ones.
@pytest.mark.parametrize("size", [("--examples", 60, "--seed", 1), in_full("--examples", 3000)])
def test_any_order_of_events_drains_exactly_once(folder: Path, size: tuple[object, ...]) -> None:
    must_pass(folder, "queue_machine.py", *size)


@pytest.mark.parametrize("size", [("--count", 1600), in_full("--count", 40_000)])
def test_corrupt_files(folder: Path, size: tuple[object, ...]) -> None:
    must_pass(folder, "queue_corruption.py", *size)


def test_every_operation_fails_once(folder: Path) -> None:
    must_pass(folder, "queue_disk_full.py", "--errors", 1)


def test_a_disk_that_is_really_full(folder: Path) -> None:
    (folder / "q").mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size=512k,mode=700 none {folder}/q && exec "$@"'
    prefix = ("unshare", "-Urm", "sh", "-c", mount, "sh")
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if allowed.returncode != 0:
        pytest.skip(f"no mount in a user namespace here: {allowed.stderr.strip()}")
    must_pass(folder, "queue_disk_full.py", prefix=prefix)


def test_an_orphaned_child_of_a_worker_keeps_nothing(folder: Path) -> None:
    must_pass(folder, "queue_orphan.py")


def test_clocks_do_not_matter(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is gone, and every file is a year too old or too new."""

    def no_clock() -> float:
        raise AssertionError("the queue asked for the time of day")

    monkeypatch.setattr(time, "time", no_clock)
    log = Log(folder / "log")
    trainer = Trainer(folder / "q", 8, log, window=8, watch_workers=False)
    for turn, number in enumerate((1, 2, 1)):
        worker = WorkerQueue.open(folder / "q", number, "cpu")
        trainer.submit()
        claims = claim_now(worker, 3)
        for path in (folder / "q").rglob("*"):
            moment = 1_700_000_000 + (1 if (turn + len(path.name)) % 2 else -1) * 365 * 86400
            os.utime(path, (moment, moment))
        for claim in claims[1:]:
            execute(worker, claim, log)
        trainer.collect()
        worker._lock.release()  # it dies with a job
    with closing(WorkerQueue.open(folder / "q", 1, "cpu")) as worker:
        trainer.queue.recover_dead()
        while claims := claim_now(worker, 3):
            for claim in claims:
                execute(worker, claim, log)
    trainer.collect()
    trainer.queue.close()
    assert trainer.done
    told = replay(folder / "log", 8)
    assert told["healing"] == {}


@pytest.mark.parametrize("module", QUEUE_MODULES, ids=lambda path: path.name)
def test_no_module_of_the_queue_reads_clocks_of_files_or_unpickles(module: Path) -> None:
    forbidden = {"st_mtime", "st_mtime_ns", "st_ctime", "getmtime", "pickle", "torch", "marshal", "shelve"}
    for node in ast.walk(ast.parse(module.read_text())):
        names = {getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "module", "") or ""}
        names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        assert not names & forbidden, names & forbidden
        if isinstance(node, ast.Attribute) and node.attr == "time" and isinstance(node.value, ast.Name):
            assert node.value.id != "time", "the wall clock is read"


CAUGHT_BY: dict[str, tuple[object, ...]] = {  # the quickest way to catch each
    "claim_removed_before_the_result_is_there": ("queue_crash_points.py", "--every", 500),
    "files_written_in_place": ("queue_machine.py", "--examples", 200),
    "nobody_recovers": ("queue_machine.py", "--examples", 200),
    "leftovers_of_a_restarted_worker_stay": ("queue_machine.py", "--examples", 200),
    "jobs_taken_from_the_living": ("queue_machine.py", "--examples", 200),
    "results_not_deduplicated": ("queue_machine.py", "--examples", 200),
    "consumed_groups_not_given_back": ("queue_crash_points.py", "--every", 23),
    "broken_and_missing_jobs_not_issued_again": ("queue_machine.py", "--examples", 200),
    "no_checksum": ("queue_corruption.py", "--count", 400),
    "attempts_not_counted": ("queue_crash_points.py", "--every", 50),
    "handing_back_counts_as_a_failure": ("queue_machine.py", "--examples", 200),
    "reason_written_last": ("queue_crash_points.py", "--every", 500),
    "locks_that_a_forked_child_keeps": ("queue_orphan.py", "--deadline", 1),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_seeded_bug_is_caught(folder: Path, mutant: str) -> None:
    script, *arguments = CAUGHT_BY[mutant]
    code, told = run(folder, str(script), *arguments, "--seed", 5, "--mutant", mutant)
    assert code == 1, f"nobody noticed:\n{told}"
