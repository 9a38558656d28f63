"""The job of the SageMaker example in a mount namespace: a folder that is read-only, a disk that fills up at SIGTERM;
and a job that stops early."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sagemaker_job import DEADLINE_S, EXAMPLE, ends_well, model_in, started, until_found

_CAN_MOUNT = shutil.which("nsenter") is not None and (
    subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode == 0
)
mounts = pytest.mark.skipif(not _CAN_MOUNT, reason="no user namespaces here, so nothing can be mounted")
pytestmark = [pytest.mark.slow, pytest.mark.integration]


@contextmanager
def mounted(mount: str) -> Iterator[tuple[list[str], Path]]:
    """A mount namespace with this mount: what starts a command in it, and its root as it is seen from here."""
    holder = subprocess.Popen(
        ["unshare", "-Urm", "sh", "-c", f"{mount} && echo ready && exec sleep {2 * DEADLINE_S}"], stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"ready\n"
        enter = ["nsenter", "-t", str(holder.pid), "-U", "--preserve-credentials", "-m"]
        yield enter, Path("/proc", str(holder.pid), "root")
    finally:
        holder.kill()
        holder.wait()


@mounts
def test_a_read_only_folder_for_checkpoints_is_the_failure_of_the_job(tmp_path: Path) -> None:
    root = tmp_path / "ml"
    folder = root / "checkpoints"
    folder.mkdir(parents=True)
    read_only = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    with mounted(read_only) as (enter, _), started(root, tmp_path / "log.txt", enter=enter) as job:
        assert job.wait(DEADLINE_S) == 2
    reason = (root / "output" / "failure").read_text()
    assert "Checkpoints cannot be written" in reason and "Read-only file system" in reason


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC


@mounts
def test_a_disk_that_is_full_at_sigterm_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    root, log = tmp_path / "ml", tmp_path / "log.txt"
    model_in(root / "input" / "data" / "model")
    folder = root / "checkpoints"
    folder.mkdir()
    with mounted(f"mount -t tmpfs -o size=64m tmpfs {folder}") as (enter, seen):
        checkpoints = seen / folder.relative_to("/")
        with started(root, log, enter=enter, save_steps="8", eval_every="0") as job:
            until_found(lambda: list(checkpoints.glob("trainer/checkpoint-8/trainer_state.json")), job, log)
            fill(checkpoints)
            job.send_signal(signal.SIGTERM)
            assert job.wait(DEADLINE_S) != 0, log.read_text()
        assert "No space left" in (root / "output" / "failure").read_text(), log.read_text()
        (checkpoints / "filler").unlink()
        ends_well(root, log, enter=enter, save_steps="8", eval_every="0")
    steps = [int(step) for step in re.findall(r"^[0-9:]+ step ([0-9]+)/", log.read_text(), re.MULTILINE)]
    assert steps and steps[0] == 9 and steps[-1] == 40
    assert (root / "model" / "model.safetensors").is_file()


def test_a_job_whose_evaluations_do_not_improve_stops_early(tmp_path: Path) -> None:
    """Nothing is learned with a learning rate of 0, and an evaluation has the same seeds at each version."""
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    root, log = tmp_path / "ml", tmp_path / "log.txt"
    model_in(root / "input" / "data" / "model")
    more = {"learning_rate": "0", "eval_every": "2", "early_stopping_patience": "2", "max_steps": "1000"}
    for again in ("", " again"):
        ends_well(root, log, **more)
        said = log.read_text()
        assert "stopped early: 2 evaluations in a row have not improved the mean reward by more than 0" in said, again
    assert "/1000 ETA" not in said, "the job that is started again only writes the model"
    steps = [json.loads(line)["step"] for line in (root / "checkpoints/run/evaluations.jsonl").read_text().splitlines()]
    assert steps[0] == 0 and 3 <= len(steps) < 10, "such short steps outrun evaluations, of which some are skipped"
    assert (root / "model" / "model.safetensors").is_file() and not (root / "output" / "failure").exists()


def test_the_entry_point_needs_nothing_but_its_folder() -> None:
    """The service calls it with a path, from any folder."""
    env = {**os.environ, "SM_ROOT": "/proc/none", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")}
    line = [sys.executable, EXAMPLE / "train.py", "--nothing=1"]
    ran = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 2 and "There is no hyperparameter nothing" in ran.stderr
    assert "the reason could not be written" in ran.stderr
