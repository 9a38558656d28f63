"""A whole run that begins with a function of an open session."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo import AsyncGRPO
from async_grpo.rundir.paths import FINISHED
from kit.runs import DEADLINE_S, ROOT, SETUP, Command

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SESSION = """
import sys, time
from async_grpo import AsyncGRPO
exec(compile(open(sys.argv[1]).read(), "<cell>", "exec"))
STEPS = {"steps": 300}
made_by_the_file = get_trainer
def build():
    return made_by_the_file()
handle = AsyncGRPO(build, workers=1, run_dir="worker", eval_every=0, **STEPS).start()
print("begun", flush=True)
time.sleep(1000)
"""


def test_a_run_of_a_session_outlives_it_and_its_worker(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SESSION, str(SETUP)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as session:
        assert session.stdout is not None
        assert any(line == b"begun\n" for line in session.stdout)
        session.kill()  # the kernel is restarted
    handle = AsyncGRPO.attach(tmp_path / "worker")
    try:
        handle.wait(step=2, timeout_s=DEADLINE_S)
        killed = worker_of(handle.status())
        psutil.Process(killed).kill()
        handle.wait(step=handle.status().step + 20, timeout_s=DEADLINE_S)
        assert worker_of(handle.status()) not in (None, killed), "another one has got the function"
    finally:
        result = handle.stop()
    assert result.summary["state"] in ("stopped", FINISHED)
    again = Command(["train", "--resume"], tmp_path)
    assert again.wait() == 2
    assert "AsyncGRPO(build, resume=True, run_dir=…).train()" in again.output


def worker_of(view: Any) -> int | None:
    """The pid of the live worker."""
    return next((worker.pid for worker in view.workers if worker.alive), None)
