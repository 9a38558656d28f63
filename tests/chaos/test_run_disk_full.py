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


pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not _CAN_MOUNT, reason="no user namespaces here, so no small disk can be mounted"),
]
PYTHON = f"{shlex.quote(sys.executable)} -m async_grpo.cli"
SETUP = shlex.quote(str(ROOT / "tests" / "kit" / "setups" / "random_model.py"))


def output_of(script: str, folder: Path, size: str) -> str:
    """What a script writes to `output.txt`, in a folder where `small` is a disk of `size`."""
    (folder / "small").mkdir()
    subprocess.run(
        ["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size={size} tmpfs small || exit 99\n{script}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TEST_EVAL": "16"},
        stdin=subprocess.DEVNULL,
        check=True,
    )
    return (folder / "output.txt").read_text()


def test_a_run_goes_on_when_the_disk_is_full(tmp_path: Path) -> None:
    script = f"""
        {PYTHON} train {SETUP} -n 1 {OPTIONS} --run-dir small/worker > output.txt 2>&1
        echo $? > code.txt
        {PYTHON} audit small/worker --json > audit.json
        cp small/worker/evaluations.jsonl .
    """
    output = output_of(script, tmp_path, "800k")
    assert (tmp_path / "code.txt").read_text() == "0\n", output[-3000:]
    assert "The disk is full: removed" in output
    report = json.loads((tmp_path / "audit.json").read_text())
    assert report["anomalies"] == []
    assert (report["used"], report["steps"]) == (STEPS * 4, STEPS)
    assert report["trimmed"] > 0
    evaluations = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluations] == list(range(0, STEPS + 1, 12)), output
    assert all(one["failed"] == {} and one["figures"]["pass@1"]["problems"] == 16 for one in evaluations)


def test_a_stop_while_a_checkpoint_waits_for_room_says_in_a_sentence_what_was_not_written(tmp_path: Path) -> None:
    """Its libraries would end in tracebacks of their own. What was trained since is trained on again."""
    script = f"""
        ln -s small/checkpoints checkpoints; mkdir small/checkpoints
        {PYTHON} train {SETUP} -n 1 --steps 12 --run-dir worker > output.txt 2>&1 & run=$!
        while ! grep -q 'of room in' output.txt && kill -0 $run; do sleep .1; done
        cat /dev/zero > small/full; kill -INT $run; wait $run
        rm small/full; mount -o remount,size=99m small
        {PYTHON} train {SETUP} -n 1 --steps 12 --run-dir worker --resume > resumed.txt 2>&1 || exit 98
        {PYTHON} audit worker --json > audit.json
    """
    output = output_of(script, tmp_path, "1500k")
    assert "The disk is full: checkpoint-8 was not written. It takes about" in output, output[-3000:]
    assert "Traceback" not in output and "--resume" in output
    report = json.loads((tmp_path / "audit.json").read_text())
    assert (report["anomalies"], report["steps"], report["used"]) == ([], 12, 48)
