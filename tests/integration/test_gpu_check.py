"""`scripts/gpu_check.sh` as far as a CPU allows: its parts, its report, and that one failure stops nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT

from patience import is_gone, until

pytestmark = pytest.mark.integration


def check(tmp_path: Path, *arguments: str, **env: str) -> tuple[int, str]:
    """The exit code and the report."""
    report = tmp_path / "report.md"
    ran = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), *arguments, "--dry-run", "--report", str(report)],
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    return ran.returncode, report.read_text() if report.exists() else ran.stderr


def test_parts_of_the_report(tmp_path: Path) -> None:
    code, report = check(tmp_path, "weights", "gsm8k", "targets", GSM8K_PATH="")
    assert code == 0, report
    assert "no figure here means anything" in report
    assert f"## Weights\n\n    {sys.executable} benchmarks/weights.py --help\n" in report, "each part names its command"
    assert "```\n\nDone in" in report
    assert "## GSM8K\n\nLeft out: GSM8K_PATH names no folder" in report
    assert "| attach | <= 50 ms | not measured | |" in report


def test_a_part_that_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    code, report = check(tmp_path, "smoke", "weights", GSM8K_PATH="", PYTHON="false")
    assert code == 1
    for part in ("Doctor", "Weights between processes", "Weights"):
        section = report.split(f"## {part}\n")[1].split("\n## ")[0]
        assert "**Failed** with exit code 1" in section


def slow_check(tmp_path: Path, benchmark: str) -> subprocess.Popen[bytes]:
    """The part `weights`, with a Python that runs this line of a shell in place of the benchmark."""
    slow = tmp_path / "python"
    slow.write_text(f"#!/bin/sh\ncase $1 in *.py) {benchmark} ;; *) exit 0 ;; esac\n")
    slow.chmod(0o755)
    env = {**os.environ, "PYTHON": str(slow), "OUT": str(tmp_path)}
    script = ROOT / "scripts" / "gpu_check.sh"
    return subprocess.Popen([str(script), "weights", "--dry-run"], env=env, start_new_session=True)


def test_a_report_that_is_killed_has_what_was_said_until_then(tmp_path: Path) -> None:
    """The machine may be taken away in the middle of a part. By default the report is where OUT says."""
    with slow_check(tmp_path, "echo half a figure; sleep 60") as running:
        report = tmp_path / "gpu_report.md"
        deadline = time.monotonic() + 60
        while not (report.exists() and "half a figure" in report.read_text()):
            assert time.monotonic() < deadline, "it is written as it comes"
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGKILL)
    assert "half a figure" in report.read_text()


def test_a_check_that_is_ended_ends_the_part_that_runs(tmp_path: Path) -> None:
    """A part that is left behind would share the GPU with what is measured next."""
    with slow_check(tmp_path, 'echo $$ >"$OUT/pid"; exec sleep 600') as running:
        pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the part's pid"))
        running.terminate()
        assert running.wait(60) == 143
    until(lambda: is_gone(pid), "the part's end")


def test_the_plan_has_each_part_in_under_ten_minutes(tmp_path: Path) -> None:
    code, report = check(tmp_path, "--plan", GSM8K_PATH="data")
    assert code == 0 and not report, "nothing is run, and nothing is reported"
    script = [str(ROOT / "scripts" / "gpu_check.sh"), "--plan"]
    plan = subprocess.run(script, env={**os.environ, "GSM8K_PATH": "data"}, capture_output=True, text=True, timeout=60)
    limits: dict[str, int] = {}
    for line in plan.stdout.splitlines():
        if line.startswith("scripts/gpu_check.sh "):
            part = line.split()[1]
            limits[part] = 0
        elif found := re.search(r"at most (\d+) s", line):
            limits[part] += int(found[1])
    assert list(limits) == [
        "smoke",
        "tests",
        "kill",
        "kinds",
        "async",
        "padding",
        "weights",
        "deterministic",
        "gsm8k",
        "targets",
    ]
    assert all(seconds < 600 for seconds in limits.values())
    assert all(limits[part] for part in limits if part != "targets")


def test_an_unknown_part(tmp_path: Path) -> None:
    assert check(tmp_path, "everything") == (2, "unknown: everything\n")


@pytest.mark.parametrize(("value", "verdict"), [(1.69, "**no**"), (1.7, "yes")])
def test_targets_are_held_against_the_worst_row(tmp_path: Path, value: float, verdict: str) -> None:
    rows = [{"name": "1 worker against TRL alone", "value": 9}, {"name": "2 workers against TRL alone", "value": value}]
    (tmp_path / "gpu_async.json").write_text(json.dumps({"rows": rows}))
    rows = [{"name": "publish, 1B fp32, flat", "value": 0.5}, {"name": "publish, 1B bf16, flat", "value": 0.1}]
    (tmp_path / "gpu_weights.json").write_text(json.dumps({"rows": rows}))
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_targets.py"), str(tmp_path)]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert f"| >= 1.7 of its rollouts/s | {value} | {verdict} |" in table
    assert "| publish | >= 0.85 of raw copy | 0.5 | **no** |" in table


@pytest.mark.slow
def test_asynchronous_against_trl(tmp_path: Path) -> None:
    code, report = check(tmp_path, "async")
    assert code == 0, report
    assert "| TRL alone | 2 |" in report
    assert "| 1 worker | 2 |" in report
