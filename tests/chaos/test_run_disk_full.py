"""A whole run on a disk that is too small for its archive: it trims, waits, continues, evaluates, and loses nothing."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 48  # of 4 groups of a page each; the disk is full after about 34, and half of it is trimmed then
OPTIONS = f"--steps {STEPS} --eval-every 12 --eval-replicates 1 --max-staleness 2"

_CAN_MOUNT = shutil.which("unshare") is not None and (
    subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
)


@pytest.mark.integration
@pytest.mark.skipif(not _CAN_MOUNT, reason="no user namespaces here, so no small disk can be mounted")
def test_a_run_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    python = f"{shlex.quote(sys.executable)} -m async_grpo.cli"
    setup = shlex.quote(str(ROOT / "tests" / "integration" / "setups" / "random_model.py"))
    script = f"""
        mount -t tmpfs -o size=800k tmpfs {shlex.quote(str(disk))} || exit 99
        {python} train {setup} -n 1 {OPTIONS} --run-dir {shlex.quote(str(disk))}/worker > output.txt 2>&1
        echo $? > code.txt
        {python} audit {shlex.quote(str(disk))}/worker --json > audit.json
        cp {shlex.quote(str(disk))}/worker/evaluations.jsonl .
    """
    subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TEST_EVAL": "16"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    output = (tmp_path / "output.txt").read_text()
    assert (tmp_path / "code.txt").read_text() == "0\n", output[-3000:]
    assert "The disk is full: removed" in output
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["anomalies"] == []
    assert (report["used"], report["steps"]) == (STEPS * 4, STEPS)
    assert report["trimmed"] > 0
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluations] == list(range(0, STEPS + 1, 12)), output
    assert all(one["failed"] == {} and one["figures"]["pass@1"]["problems"] == 16 for one in evaluations)
