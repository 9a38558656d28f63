"""Plant faults in a copy of the sources, one at a time, and say which test catches each: can the tests still fail?

    python tests/plant_faults.py                          all of them, 10 minutes; 1 if one is missed
    python tests/plant_faults.py --only stale-by-one      one of them
    python tests/plant_faults.py --list                   what there is
    python tests/plant_faults.py --json FILE              also what was found, to compare two suites by

Run it by hand before and after tests are removed; it is no part of CI. At the end the tests that caught something run
once without a fault: one that fails then has caught nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from planted import PLANTED

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 300  # of one call of pytest
CAUGHT, MISSED, UNKNOWN = "caught", "missed", "unknown"


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake, and where to look for it."""

    name: str
    file: str  # below src
    targets: list[str]  # below tests
    before: str
    after: str


@dataclass(slots=True)
class Found:
    """What the tests say of a fault."""

    fault: str
    verdict: str
    by: str  # the first test that failed; else why there is none
    seconds: float


def faults(text: str) -> Iterator[Fault]:
    """Read the faults of `planted`."""
    for block in text.strip().split("\n\n"):
        head, *lines = block.splitlines()
        name, file, *targets = head.split()
        before, after = ([line[1:] for line in lines if line[0] == sign] for sign in "-+")
        if len(before) == 1:  # a part of a line, behind a space
            before, after = [line.strip() for line in before], [line.strip() for line in after]
        yield Fault(name, file, targets, "\n".join(before), "\n".join(after))


def copy_tracked(target: Path) -> None:
    """Copy the files that git knows of, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)


def run_tests(copy: Path, tests: Sequence[str], *options: str) -> tuple[int, str]:
    """Run pytest in the copy; returns its exit code and what it printed. `timeout` ends it with all that it started."""
    env = {**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": str(copy / "src")}
    command = ["timeout", "--signal=KILL", f"{DEADLINE_S}", sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line"]
    command += ["-p", "no:cacheprovider", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:  # a pipe would stay open as long as anything that a test started
        code = subprocess.run(command, cwd=copy, env=env, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        return code, output.read()


def failed(output: str) -> list[str]:
    """The tests that failed, or had an error before they began."""
    return re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE)


def look_for(fault: Fault, copy: Path) -> Found:
    """Plant the fault, run its tests up to the first that fails, and take the fault away."""
    path, began = copy / "src" / fault.file, time.monotonic()
    there = [f"tests/{target}" for target in fault.targets if (copy / "tests" / target).exists()]
    if (text := path.read_text()).count(fault.before) != 1 or not there:
        why = f"its lines are {text.count(fault.before)} times in {fault.file}" if there else "its tests are gone"
        return Found(fault.name, UNKNOWN, why, 0.0)
    path.write_text(text.replace(fault.before, fault.after))
    verdict, by = MISSED, "MISSED: every test passes"
    try:
        for target in there:  # one after the other: collecting a folder takes longer than most files of it
            code, output = run_tests(copy, [target], "-x")
            if code != 0:
                tests = failed(output) if code == 1 else []
                verdict, by = (CAUGHT, tests[0]) if tests else (UNKNOWN, why_not(code, output))
                break
    finally:
        path.write_text(text)
    return Found(fault.name, verdict, by, round(time.monotonic() - began, 1))


def why_not(code: int, output: str) -> str:
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    return f"no end in {DEADLINE_S} s" if killed else f"pytest ended with {code}: {output.strip()[-300:]}"


def without_fault(found: Sequence[Found], copy: Path) -> None:
    """Take back what tests have caught that fail anyway."""
    tests = sorted({one.by for one in found if one.verdict == CAUGHT})
    code, output = run_tests(copy, tests) if tests else (0, "")
    failing = failed(output) if code == 1 else []
    for one in found:
        if one.verdict == CAUGHT and code != 0 and (one.by in failing or not failing):
            one.verdict, one.by = UNKNOWN, f"{one.by} fails without the fault" if failing else why_not(code, output)


def main() -> int:
    every = {fault.name: fault for fault in faults(PLANTED)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=every, default=[*every], help="of these faults")
    parser.add_argument("--list", action="store_true", help="the faults, and where they are planted")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    args = parser.parse_args()
    chosen = [every[name] for name in args.only]
    if args.list:
        for fault in chosen:
            print(f"{fault.name:28} src/{fault.file}: {' '.join(fault.targets)}")
        return 0
    console, table = Console(), Table("fault", Column("caught by", overflow="fold"), "seconds")
    found: list[Found] = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy_tracked(Path(folder))
        for fault in chosen:
            found.append(look_for(fault, Path(folder)))
            console.print(f"{found[-1].verdict} {fault.name} ({found[-1].seconds:g} s)", highlight=False)
        without_fault(found, Path(folder))
    for one in found:
        table.add_row(one.fault, escape(one.by), f"{one.seconds:g}")
    console.print(table)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    return int(any(one.verdict != CAUGHT for one in found))


if __name__ == "__main__":
    sys.exit(main())
