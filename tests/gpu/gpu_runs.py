"""Commands of async-grpo on the device of the tests, their logs, and what their files have to say at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from on_device import ON_CPU

from kit.runs import values_logged

ROOT = Path(__file__).parents[2]
DEVICE_ID = "cpu" if ON_CPU else "0"
DEVICES = ("--master-device-id", DEVICE_ID, "--worker-device-ids", f"{DEVICE_ID},{DEVICE_ID}")
AUDIT_S = 120.0


def cli(folder: Path, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    output = (folder / "output.txt").open("ab")
    command = [sys.executable, "-m", "async_grpo.cli", *arguments]
    surroundings = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.Popen(command, cwd=folder, env=surroundings, stdout=output, stderr=subprocess.STDOUT)


def said(folder: Path) -> str:
    logs = [folder / "output.txt", *sorted((folder / "worker").glob("log_*.txt"))]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


def expect_end(run: subprocess.Popen[bytes], folder: Path, deadline_s: float) -> None:
    """Wait for the end of a run that has to succeed; one that does not end is ended."""
    try:
        assert run.wait(deadline_s) == 0, said(folder)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"it runs after {deadline_s:.0f} s: {said(folder)}") from None
    finally:
        if run.poll() is None:
            run.terminate()
            run.wait(60)


def expect_finished(folder: Path, steps: int) -> None:
    """A run of so many steps, whose files prove that each group was trained on once."""
    summary = json.loads((folder / "worker" / "summary.json").read_text())
    assert (summary["state"], summary["steps"]) == ("finished", steps)
    expect_end(cli(folder, "audit", "worker"), folder, AUDIT_S)


def mismatch(folder: Path) -> list[float]:
    """For each step with fresh rollouts, the mean difference between sampler and trainer, in log-probabilities."""
    return values_logged(folder / "worker", "async/logprob_mismatch")
