"""The sandbox for code in completions: programs a second, one and four at once, and what a start costs in CPU time.

    python benchmarks/sandbox.py [--json FILE]

A program here does a little arithmetic, so nearly all of its time is the start of the sandbox and of Python. "A core"
divides the programs by the CPU time that they and their sandboxes took, which other work on the machine changes less
than the wall clock.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import Row, as_text, row, write_json

from async_grpo.rewards.sandbox import SWITCH, run_code

ROUNDS, PROGRAMS = 5, 40  # of each row
PROGRAM = "print(sum(n * n for n in range(1000)))"
ANSWER = "332833500\n"


def in_the_sandbox() -> None:
    result = run_code(PROGRAM)
    assert result.stdout == ANSWER, result


def without_one() -> None:
    """The same program in a Python of its own: what a start costs without isolation."""
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ran.stdout == ANSWER, ran


def measure(program: Callable[[], None], at_once: int) -> tuple[list[float], list[float]]:
    """Programs a second, and programs a second of CPU time, of each round."""
    by_wall, by_cpu = [], []
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(ROUNDS):
            started, cpu = time.monotonic(), cpu_s()
            for future in [pool.submit(program) for _ in range(PROGRAMS)]:
                future.result()
            by_wall.append(PROGRAMS / (time.monotonic() - started))
            by_cpu.append(PROGRAMS / (cpu_s() - cpu))
    return by_wall, by_cpu


def cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def rows() -> list[Row]:
    found = []
    for name, program in (("sandbox", in_the_sandbox), ("Python alone", without_one)):
        program()  # what is read once
        for at_once in (1, 4):
            by_wall, by_cpu = measure(program, at_once)
            found += [row(f"{name}, {at_once} at once", by_wall, "1/s")]
            found += [row(f"{name}, {at_once} at once, a core", by_cpu, "1/s")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    os.environ[SWITCH] = "1"
    load = os.getloadavg()
    measured = rows()
    print(as_text(measured))
    if options.json:
        write_json(options.json, measured, load_before=load)


if __name__ == "__main__":
    main()
