"""Whole runs: a real launcher, server and workers, on a model of a few thousand parameters; and one that hangs."""

from __future__ import annotations

import json
import re
import signal
import tarfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from async_grpo.cli import main
from async_grpo.deltas.chain import Chain, chain_folder
from async_grpo.deltas.tensors import as_tensors
from kit.runs import SETUP, Command, command, finish, logged, ran, read, steps_logged
from kit.waiting import until_gone

SHARES = """
import faulthandler, logging, signal, warnings
import torch
from loguru import logger
from random_model import *

logger.remove()
logger.add("mine.log")
logger.info("a line of the user's")
logging.disable(logging.CRITICAL)
logging.basicConfig(force=True)
warnings.simplefilter("error")
faulthandler.register(signal.SIGUSR1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout = sys.stderr = open("mine.txt", "a")
sys.excepthook = lambda *_: None
torch.set_default_dtype(torch.float64)
torch.set_default_device("cpu")
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("high")
torch.backends.cudnn.allow_tf32 = True
"""


def test_a_run_survives_the_death_of_a_worker_and_uses_every_prompt_once(tmp_path: Path) -> None:
    """Its file changes what the process shares, and one prompt is poisoned, which costs its own group."""
    run_dir = tmp_path / "worker"
    (file := tmp_path / "mine.py").write_text(f"import sys\nsys.path.append({str(SETUP.parent)!r})\n{SHARES}")
    train = ("train", str(file), "-n", "2", "--steps", "12", "--seed", "3")
    with command(*train, cwd=tmp_path, TEST_REWARD="signals poison", TEST_REWARD_S="0.3") as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 3, "three steps")
        children = run.children()
        run.wait_until(lambda: run.worker(1), "worker 1").kill()
        assert run.wait() == 0, run.output

    assert steps_logged(run_dir) == list(range(1, 13))
    until_gone(children)
    summary = read(run_dir / "summary.json")
    assert summary["state"] == "finished"
    assert summary["steps"] == 12
    assert summary["rollouts"] == 12 * 16
    assert summary["staleness_max"] <= 4
    assert summary["jobs_quarantined"] == 1
    (reason,) = (run_dir / "quarantine").glob("*.reason")
    assert "RuntimeError: no reward for 3+3=" in reason.read_text()
    assert read(run_dir / "run.json")["state"] == "finished"

    rollouts = read(tmp_path / "checkpoints" / "checkpoint-12" / "rollout_state.json")
    used_or_unusable = rollouts["consumed_below"] + len(rollouts["consumed"])
    assert (used_or_unusable, rollouts["rounds"]) == (12 * 4 + 1, 12), rollouts
    last = logged(run_dir)[-1]
    expected = {"staleness_mean", "staleness_max", "rollouts_per_second", "trainer_wait_fraction", "weight_version"}
    expected |= {"worker_busy_fraction", "queue_pending", "queue_processing", "queue_complete"}
    assert {f"async/{name}" for name in expected} <= last.keys()
    assert {"reward", "rewards/reward/mean", "entropy", "completions/mean_length", "digits", "grad_norm"} <= last.keys()
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert "board worker" in run.output and " step 12/12 " in run.output
    log = (run_dir / "log_worker_2.txt").read_text()
    assert "jobs/s; generation" in log and "worker dev2 ends: " in log
    assert log.count("the reward functions use signals") == 1
    put_back = "the setup file replaces sys.stderr, sys.excepthook, SIGTERM in this process: put back"
    assert put_back in log and put_back in (run_dir / "log_parameter_server.txt").read_text()
    lines = (tmp_path / "mine.log").read_text().splitlines()
    assert {line.rpartition(" - ")[2] for line in lines} == {"a line of the user's"}


def test_a_stopped_run_keeps_a_checkpoint_and_resumes_where_it_was(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    train = ("train", str(SETUP), "-n", "1", "--delta-every", "1")
    with command(*train, "--steps", "100000", cwd=tmp_path) as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 3, "three steps")
        run.worker(1).kill()  # the only one: nothing is generated until it is started again
        before = len(steps_logged(run_dir))
        run.wait_until(lambda: len(steps_logged(run_dir)) >= before + 10, "ten more steps")
        stopped = end_with_sigterm(run, tmp_path)
    assert read(run_dir / "summary.json")["worker_restarts"] == 1

    with command(*train, cwd=tmp_path) as refused:
        assert refused.wait() == 2
    assert all(way in refused.output for way in ("--resume", "--run-dir", "--overwrite")), refused.output

    goal = stopped + 5
    finish(tmp_path, "-n", "1", "--steps", str(goal), "--resume")
    kept_versions_are_those_of_the_checkpoints(tmp_path, goal)
    assert steps_logged(run_dir) == list(range(1, goal + 1))
    assert read(run_dir / "summary.json")["state"] == "finished"
    rollouts = read(tmp_path / "checkpoints" / f"checkpoint-{goal}" / "rollout_state.json")
    assert rollouts["consumed_below"] + len(rollouts["consumed"]) == goal * 4


def kept_versions_are_those_of_the_checkpoints(folder: Path, goal: int) -> None:
    chain = Chain(chain_folder(folder / "worker"))
    assert not chain.verify().problems
    assert chain.versions[0] == 0 and chain.versions[-1] == goal
    saved = load_file(folder / "checkpoints" / f"checkpoint-{goal}" / "model.safetensors")
    rebuilt = as_tensors(chain.rebuild(goal), chain.about.tensors)
    assert all(rebuilt[name].equal(tensor) for name, tensor in saved.items()) and saved


def end_with_sigterm(run: Command, folder: Path) -> int:
    """Stop a run, which leaves no child and a checkpoint; the step of that."""
    children = run.children()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 0, run.output
    until_gone(children)
    state = read(folder / "worker" / "run.json")
    assert state["state"] == "stopped"
    assert (folder / "checkpoints" / f"checkpoint-{state['step']}" / "rollout_state.json").exists()
    return int(state["step"])


def test_a_reward_that_always_raises_stops_the_run_with_its_traceback(tmp_path: Path) -> None:
    said = ran("train", str(SETUP), "-n", "1", cwd=tmp_path, TEST_REWARD="broken", code=1)
    assert said.count("Traceback (most recent call last)") == 1, said
    assert "RuntimeError: no reward for" in said
    assert read(tmp_path / "worker" / "summary.json")["state"] == "failed"


def test_by_hand_in_any_order(tmp_path: Path) -> None:
    run_dir, go_on = tmp_path / "worker", tmp_path / "go_on"
    serve = ("server", "--config", str(SETUP), "-d", "cpu")
    with command("worker", "-d", "cpu", cwd=tmp_path, TEST_REWARD="held", TEST_MARKER=str(go_on)) as early:
        early.wait_until(lambda: early.process.poll() is None, "the worker to run")
        with command(*serve, "--steps", "12", cwd=tmp_path) as server:
            server.wait_until(lambda: (run_dir / "ps_ipc_handle.json").exists(), "weights")
            with command(*serve, "--resume", cwd=tmp_path) as second:
                assert second.wait() == 2
            assert f"pid {server.process.pid}" in second.output, second.output
            go_on.touch()
            assert server.wait() == 0, server.output
        assert early.wait() == 0, early.output
    assert "worker dev1 ends:" in early.output
    assert steps_logged(run_dir) == list(range(1, 13))
    assert "worker dev1 ends:" in (run_dir / "log_worker_1.txt").read_text()


# --- What `status` and `doctor --dump` say of a real run that hangs ----------------------------------------------

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
        server, worker = run.wait_until(lambda: len(found := stalls(run_dir)) == 2 and found, "a stalled worker")
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
