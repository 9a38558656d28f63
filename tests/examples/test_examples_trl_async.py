"""TRL's asynchronous trainer trains with workers of this queue, one of which is killed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from runs import ROOT, command, gone, read

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(3000)]

DEADLINE_S = 1200.0  # the example loads torch, transformers and TRL three times, and trains, beside other work
EXAMPLE = ROOT / "examples" / "trl_async" / "train.py"


@contextmanager
def example(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example, with its output in `output.txt`; at the end of the block all that it started is gone."""
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen([sys.executable, str(EXAMPLE)], cwd=folder, stdout=output, stderr=output)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
        process.kill()
        process.wait()


def worker(process: subprocess.Popen[bytes], number: int) -> psutil.Process | None:
    for child in psutil.Process(process.pid).children():
        with suppress(psutil.NoSuchProcess):
            arguments = child.cmdline()
            if "worker" in arguments and arguments[arguments.index("--id") + 1] == str(number):
                return child
    return None


def first_claim(run: Path, process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """The sequence number of a job, and the number of the worker that has it: the first that has one."""
    deadline = time.monotonic() + DEADLINE_S
    while not (claims := list((run / "queue").glob("*_processing_by_dev*"))):
        assert process.poll() is None and time.monotonic() < deadline, (run.parent / "output.txt").read_text()
        time.sleep(0.005)
    return int(claims[0].name.partition(".")[0]), int(claims[0].stem.rpartition("dev")[2])


def test_a_killed_worker_costs_no_rollout(tmp_path: Path) -> None:
    run, output = tmp_path / "worker", tmp_path / "output.txt"
    with example(tmp_path) as process:
        claimed, number = first_claim(run, process)
        killed = worker(process, number)
        assert killed is not None
        killed.kill()
        family = psutil.Process(process.pid).children(recursive=True)
        assert process.wait(DEADLINE_S) == 0, output.read_text()
    assert gone(family), "the workers end with the training"
    summary = read(run / "summary.json")
    assert (summary["state"], summary["jobs_quarantined"]) == ("finished", 0)
    assert summary["staleness_max"] <= 4
    used = [
        seq for line in (run / "consumed.jsonl").read_text().splitlines() for seq in json.loads(line).get("seqs", [])
    ]
    assert len(used) == len(set(used)) >= 80, "20 steps of 4 groups, each used once"
    assert claimed in used, "the other worker, or the first one started again, has made it"
    assert "sample/dropped_stale_total" not in output.read_text()
    with command("audit", str(run), cwd=tmp_path) as audit:
        assert audit.wait() == 0, audit.output
