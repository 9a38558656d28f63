"""What `status` and `doctor --dump` say of a real run that hangs."""

from __future__ import annotations

import json
import re
import tarfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_grpo.cli import main
from kit.runs import SETUP, command, ran

pytestmark = pytest.mark.integration

SCORES = r"scoring (group \d|\d groups)"  # those that wait for the call that hangs, too
SECRET = "swordfish-of-the-run"


def status(run_dir: Path, *options: str) -> tuple[int, str]:
    """The exit code of the command, and what it prints."""
    with redirect_stdout(StringIO()) as said:
        code = main(["status", str(run_dir), *options])
    return code, said.getvalue()


def view(run_dir: Path) -> tuple[int, dict[str, Any]]:
    code, text = status(run_dir, "--json")
    return code, json.loads(text)


def dump(root: Path, folder: Path) -> dict[str, str]:
    folder.mkdir()
    ran("doctor", "--dump", str(root), cwd=folder)
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        files = {entry.name.partition("/")[2]: tar.extractfile(entry) for entry in tar.getmembers()}
        return {name: file.read().decode() for name, file in files.items() if file is not None}


def test_a_reward_that_hangs_is_told_by_everyone_who_is_stalled_and_named_in_a_dump(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    surroundings = {"TEST_REWARD": "hang", "TEST_MARKER": str(tmp_path / "hung"), "SOME_API_KEY": SECRET}
    options = ("-n", "1", "--steps", "16", "--max-staleness", "0", "--stall-warning", "2")
    with command("train", str(SETUP), *options, cwd=tmp_path, **surroundings) as run:
        run.wait_until(lambda: Path(surroundings["TEST_MARKER"]).exists(), "hanging reward")
        run.wait_until(lambda: any(re.search(f"dev1 is {SCORES}", it) for it in stalls(run_dir)), "a stalled server")
        run.wait_until(lambda: len(stalls(run_dir)) == 2, "a stalled worker")
        server, worker = stalls(run_dir)
        assert worker.startswith("dev1: no progress for ") and re.search(SCORES, worker)
        assert server.startswith("server: no progress for ") and re.search("for . more groups? from 1 worker", server)
        for name, what in (("worker 1", f": {SCORES}"), ("server", f"; dev1 is {SCORES}")):
            run.wait_until(lambda name=name, what=what: warned(run.output, name, what), f"a warning of the {name}")
        dump_names_the_reward(run_dir, tmp_path / "dump")
        victim = psutil.Process(view(run_dir)[1]["workers"][0]["pid"])
        victim.suspend()
        run.wait_until(lambda: any(f"kill -CONT {victim.pid}" in stall for stall in stalls(run_dir)), "the pause")
        victim.kill()
        assert run.wait() == 0, run.output
    assert view(run_dir)[0] == 0
    assert "the run has finished" in status(run_dir, "--watch")[1]


def dump_names_the_reward(run_dir: Path, folder: Path) -> None:
    with (run_dir / "log_worker_1.txt").open("a") as log:
        log.write(f"somebody printed {SECRET}\n")
    found = dump(run_dir, folder)
    assert "random_model.py" in found["stacks/dev1.txt"] and "in reward\n" in found["stacks/dev1.txt"]
    assert "rollout_source.py" in found["stacks/server.txt"]
    assert json.loads(found["status.json"])["workers"][0]["name"] == "dev1"
    assert "== dev1" in found["processes.txt"]
    assert "_processing_by_dev1" in found["queue.txt"]
    assert "run directory" in found["doctor.txt"] and "every value arrived" in found["doctor.txt"]
    assert "somebody printed [removed]" in found["logs/log_worker_1.txt"]
    assert not [name for name, text in found.items() if SECRET in text]


def warned(output: str, name: str, what: str) -> bool:
    """Whether the launcher has shown that this process is stalled, and why: a regular expression."""
    lines = [line for line in output.splitlines() if line.startswith(f"[{name}] ")]
    return any("WARNING no progress for" in line and re.search(what, line) for line in lines)


def stalls(run_dir: Path) -> list[str]:
    return view(run_dir)[1]["stalls"]
