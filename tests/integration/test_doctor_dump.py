"""`async-grpo doctor --dump` on a real run whose reward function hangs, then on what is left of it."""

from __future__ import annotations

import json
import signal
import tarfile
from pathlib import Path

import psutil
import pytest
from runs import SETUP, command

pytestmark = pytest.mark.integration


def dump(root: Path, folder: Path) -> dict[str, str]:
    folder.mkdir()
    with command("doctor", "--dump", str(root), cwd=folder) as doctor:
        assert doctor.wait() == 0, doctor.output
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {entry.name.partition("/")[2]: tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_the_archive_of_a_hung_run_names_the_function_that_hangs(tmp_path: Path) -> None:
    root = tmp_path / "worker"
    marker = tmp_path / "hangs"
    secret = "swordfish-of-the-run"
    with command(
        *("train", str(SETUP), "-n", "1", "--score-concurrency", "1"),
        cwd=tmp_path,
        TEST_REWARD="hang",
        TEST_MARKER=str(marker),
        SOME_API_KEY=secret,
    ) as run:
        run.wait_until(marker.exists, "a reward function that hangs")
        with (root / "log_worker_1.txt").open("a") as log:
            log.write(f"somebody printed {secret}\n")
        found = dump(root, tmp_path / "live")
        assert "random_model.py" in found["stacks/dev1.txt"] and "in reward\n" in found["stacks/dev1.txt"]
        assert "rollout_source.py" in found["stacks/server.txt"]
        assert json.loads(found["status.json"])["workers"][0]["name"] == "dev1"
        assert "== dev1" in found["processes.txt"]
        assert "_processing_by_dev1" in found["queue.txt"]
        assert "run directory" in found["doctor.txt"] and "every value arrived" in found["doctor.txt"]
        assert "somebody printed [removed]" in found["logs/log_worker_1.txt"]
        assert not [name for name, text in found.items() if secret in text]
        worker = run.worker(1)
        assert worker is not None and run.process.poll() is None, "it was looked at, not ended"
        family = [psutil.Process(run.process.pid), *run.children()]
        for process in family:  # as a power cut would: nobody tidies up
            process.send_signal(signal.SIGKILL)
    found = dump(root, tmp_path / "dead")
    assert json.loads(found["status.json"])["state"] == "dead"
    assert "No process holds a lock" in found["processes.txt"]
    assert not [name for name in found if name.startswith("stacks/")]
    assert "log_parameter_server.txt" in "".join(found)
