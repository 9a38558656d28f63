"""Does a run survive what its workers hand in? One in three finished groups has fields of other types, lengths and
nesting.

    python benchmarks/fuzz_groups.py [--seconds 3600] [--run-dir DIR]

A real run of the tiny recipe with two workers, which goes on for the time given. It is stopped and resumed, once with
changed groups and once without, so that the server reads all that was handed in; then it is audited. The exit code is
0 if the server ended as it was asked to, each time, and every group is accounted for.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "benchmarks" / "setups" / "changed_groups.py"
PROGRAM = (sys.executable, "-m", "async_grpo.cli")
ENDING_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--run-dir", type=Path)
    options = parser.parse_args()
    folder = options.run_dir or Path(tempfile.mkdtemp(prefix="fuzz-groups-")) / "run"
    output = ["--set", f"output_dir={folder.with_name('output')}", "--set", "save_steps=20"]
    run = [*PROGRAM, "train", str(SETUP), "--distributed", "--master-device-id", "cpu", "-n", "2"]
    run += ["--run-dir", str(folder), "--steps", "1000000", *output]
    run += ["--accept-mismatch"]  # among what is changed are log-probabilities
    again, later_s = [*run, "--resume"], max(60.0, options.seconds / 20)
    codes = [
        stopped_after(run, options.seconds),
        stopped_after(again, later_s),
        stopped_after(again, later_s, CHANGED_SHARE="0"),
    ]
    audit = subprocess.run([*PROGRAM, "audit", str(folder)], check=False)
    set_aside = len(list((folder / "quarantine").glob("*.reason")))
    print(f"exit codes {codes}, audit {audit.returncode}, {set_aside} files set aside, in {folder}")
    return int(any(codes) or audit.returncode != 0)


def stopped_after(command: list[str], seconds: float, **more: str) -> int:
    """Ask the run to stop after the time; returns its exit code, which is 0 where it went on until then."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **more}
    with subprocess.Popen(command, env=env) as process:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            try:
                return process.wait(ENDING_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    return process.returncode or 1  # it ended by itself


if __name__ == "__main__":
    began = time.monotonic()
    code = main()
    print(f"after {time.monotonic() - began:.0f} s: {'ok' if code == 0 else 'FAILED'}")
    sys.exit(code)
