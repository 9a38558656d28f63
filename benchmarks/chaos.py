"""The fault tests in full, as figures: what was killed, stopped or corrupted, and what was lost by it.

    python benchmarks/chaos.py [--quick] [--json FILE]

Runs the scripts of `tests/chaos` that count something. Each exits with an error as soon as one of its promises is
broken, so `ok` says that none was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHAOS = ROOT / "tests" / "chaos"
WEIGHT_KILLS = re.compile(r"seed \d+: \{.*\} killed|\d+ reads of .* backwards")

# name, script, arguments in full, arguments of --quick
QUEUE: tuple[tuple[str, str, list[Any], list[Any]], ...] = (
    ("kill loop", "queue_kill_loop", ["--jobs", 10_000, "--kills", 1_000], ["--jobs", 400, "--kills", 40]),
    *(
        (name, "queue_faults", ["--part", part], ["--part", part, "--every", 100])
        for name, part in (
            ("a kill at every file operation and in recovery", "kill"),
            ("power loss at every operation", "power"),
            ("an error at every operation", "error"),
        )
    ),
    ("faults in any order", "queue_faults", ["--part", "any"], ["--part", "any", "--examples", 60]),
    ("corrupt files", "queue_faults", ["--part", "corrupt"], ["--part", "corrupt", "--count", 800]),
)
COUNTS = ("kills", "cases", "examples", "files")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [queue_row(name, script, quick if options.quick else full) for name, script, full, quick in QUEUE]
    rows.append(weights_row(options.quick))
    for row in rows:
        print(f"{row['name']:<50} {row['value']:>8} {row['unit']:<10} {'ok' if row['ok'] else 'BROKEN'}  {row['note']}")
    if options.json:
        machine = {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def queue_row(name: str, script: str, arguments: list[Any]) -> dict[str, Any]:
    memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=memory) as folder:
        command = [sys.executable, str(CHAOS / f"{script}.py"), "--root", folder, *map(str, arguments)]
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
    last = done.stdout.strip().rsplit("\n", 1)[-1]
    summary: dict[str, Any] = json.loads(last) if last.startswith("{") else {}
    count = next((summary[key] for key in COUNTS if key in summary), 0)
    count = count if isinstance(count, int) else len(count)
    note = ", ".join(f"{key} {value}" for key, value in summary.items() if not isinstance(value, (dict, list)))
    return _row(name, count, "faults", done.returncode == 0, f"{note}; {time.monotonic() - started:.0f} s")


def weights_row(quick: bool) -> dict[str, Any]:
    test = "tests/chaos/test_weights_faults.py::test_random_kills_tear_nothing_and_leak_nothing"
    selection = ["-m", "not slow"] if quick else ["-m", "slow"]
    command = [sys.executable, "-m", "pytest", "-s", test, *selection, "--timeout", "900", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    told = WEIGHT_KILLS.findall(done.stdout)
    kills = sum(
        int(number) for line in told if "killed" in line for number in re.findall(r": (\d+)", line.split("{")[1])
    )
    return _row("kills of a publishing writer and its readers", kills, "kills", done.returncode == 0, "; ".join(told))


def _row(name: str, value: int, unit: str, ok: bool, note: str) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": "nothing lost", "ok": ok, "spread": [], "note": note}


if __name__ == "__main__":
    main()
