"""The monkey of `tests/chaos/test_monkey.py`, and how often it did what.

    python benchmarks/monkey.py [--quick] [--seconds 600] [--seed N] [--json FILE]

The counts are added to those in the file, so that several goes make one table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TEST = "tests/chaos/test_monkey.py"
TOTALS = ("runs", "starts", "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    code, counts = go(20 if options.quick else options.seconds, options.seed)
    before: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    counts = Counter(before.get("counts", {})) + counts
    rows = table(counts, sound=code == 0)
    for row in rows:
        print(f"{row['name']:<32} {row['value']:>6} {row['unit']:<6} {'ok' if row['ok'] else 'BROKEN'}  {row['note']}")
    if options.json:
        machine = {"system": platform.system(), "kernel": platform.release(), "cores": os.cpu_count()}
        found = {"machine": machine, "counts": dict(sorted(counts.items())), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(code)


def go(seconds: int, seed: int | None) -> tuple[int, Counter[str]]:
    """pytest's exit code, and what was done how often."""
    with tempfile.TemporaryDirectory(prefix="monkey-") as folder:
        counts = Path(folder) / "counts.json"
        env = {**os.environ, "MONKEY_SECONDS": str(seconds), "MONKEY_JSON": str(counts)}
        if seed is not None:
            env["MONKEY_SEED"] = str(seed)
        command = [sys.executable, "-m", "pytest", "-s", "-m", "slow", "-p", "no:cacheprovider", TEST]
        done = subprocess.run(command, cwd=ROOT, env=env)
        return done.returncode, Counter(json.loads(counts.read_text()))


def table(counts: Counter[str], *, sound: bool) -> list[dict[str, Any]]:
    note = f"{counts['starts']} starts, {counts['seconds']} s"
    rows = [_row("runs", counts["runs"], "runs", note, sound)]
    faults = sorted((name, count) for name, count in counts.items() if name not in TOTALS)
    return rows + [_row(name, count, "times", "", sound) for name, count in faults]


def _row(name: str, value: int, unit: str, note: str, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": "nothing lost", "ok": ok, "spread": [], "note": note}


if __name__ == "__main__":
    main()
