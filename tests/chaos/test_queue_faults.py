"""The queue under faults. Each test runs a script of this folder in its own process, which kills and breaks things.

The scripts print the seed that they drew; `--seed` repeats a run. Slices of them run always, in full they are `slow`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import async_grpo

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
    made = Path(tempfile.mkdtemp(prefix="queue-faults-", dir=TMPFS))
    yield made
    shutil.rmtree(made)


def must_pass(folder: Path, command: str, prefix: tuple[str, ...] = ()) -> None:
    script, *arguments = command.split()
    whole = [*prefix, sys.executable, str(HERE / script), "--root", str(folder), *arguments]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=1500)
    print(told := f"{command}\n{done.stderr}{done.stdout}")
    assert done.returncode == 0, told


def in_full(command: str) -> Any:
    return pytest.param(command, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


@pytest.mark.parametrize(
    "command",
    [
        "queue_faults.py --part kill --every 100",
        "queue_faults.py --part error --every 20",
        "queue_faults.py --part power --every 4",
        in_full("queue_faults.py --part kill"),
        in_full("queue_faults.py --part error"),
        in_full("queue_faults.py --part power"),
    ],
)
def test_a_fault_at_every_operation(folder: Path, command: str) -> None:
    must_pass(folder, command)


# The same examples each time: what nobody changed cannot turn red. `make chaos` draws new ones.
@pytest.mark.parametrize(
    "command", ["queue_faults.py --part any --examples 60 --seed 1", in_full("queue_faults.py --part any")]
)
def test_any_order_of_events_drains_exactly_once(folder: Path, command: str) -> None:
    must_pass(folder, command)


@pytest.mark.parametrize(
    "command", ["queue_faults.py --part corrupt --count 1600", in_full("queue_faults.py --part corrupt")]
)
def test_corrupt_files(folder: Path, command: str) -> None:
    must_pass(folder, command)


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
    must_pass(folder, "queue_faults.py --part disk", prefix)


@pytest.mark.parametrize(
    "command", ["queue_kill_loop.py --jobs 800 --kills 80", in_full("queue_kill_loop.py --jobs 10000 --kills 1000")]
)
def test_kill_loop(folder: Path, command: str) -> None:
    """Real processes, which leave orphans with all that they had open."""
    must_pass(folder, command)


@pytest.mark.parametrize("module", QUEUE_MODULES, ids=lambda path: path.name)
def test_no_module_of_the_queue_reads_clocks_of_files_or_unpickles(module: Path) -> None:
    forbidden = {"st_mtime", "st_mtime_ns", "st_ctime", "getmtime", "pickle", "torch", "marshal", "shelve"}
    for node in ast.walk(ast.parse(module.read_text())):
        names = {getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "module", "") or ""}
        names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
        assert not names & forbidden, names & forbidden
        if isinstance(node, ast.Attribute) and node.attr == "time" and isinstance(node.value, ast.Name):
            assert node.value.id != "time", "the wall clock is read"
