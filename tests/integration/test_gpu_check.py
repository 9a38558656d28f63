"""`scripts/gpu_check.sh` as far as a CPU allows: its parts, its report, and that one failure stops nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT

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
    code, report = check(tmp_path, "weights", "gsm8k", GSM8K_PATH="")
    assert code == 0, report
    assert "no figure here means anything" in report
    assert "## Weights\n\nDone in" in report
    assert "## GSM8K\n\nLeft out: GSM8K_PATH names no folder" in report


def test_a_part_that_fails_is_said_and_the_others_go_on(tmp_path: Path) -> None:
    code, report = check(tmp_path, "tests", "weights", GSM8K_PATH="", PYTHON="false")
    assert code == 1
    assert "## Tests marked gpu\n\n**Failed** with exit code 1" in report
    assert "## Weights\n\n**Failed**" in report


def test_an_unknown_part(tmp_path: Path) -> None:
    assert check(tmp_path, "everything") == (2, "unknown: everything\n")


@pytest.mark.slow
def test_asynchronous_against_trl(tmp_path: Path) -> None:
    code, report = check(tmp_path, "async")
    assert code == 0, report
    assert "| TRL alone | 2 |" in report
    assert "| 1 worker | 2 |" in report
