"""Whole runs that begin in another way than with a setup file: TRL's YAML file, and a function of an open session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from async_grpo import AsyncGRPO
from async_grpo.rundir.paths import FINISHED, RunDir
from kit.runs import DEADLINE_S, ROOT, SETUP, Command, steps_logged

pytestmark = [pytest.mark.integration, pytest.mark.slow]

REWARD = "def length(completions, **_): return [float(len(text)) for text in completions]"
SETTINGS = {
    "model_name_or_path": "model",
    "dtype": "float32",
    "dataset_name": "rows",
    "output_dir": "out",
    "max_steps": 400,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 8,
    "report_to": "none",
    "bf16": False,
    "disable_tqdm": True,
}
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


@pytest.fixture
def of_trl(tmp_path: Path) -> Path:
    from kit.tiny_trainer import PROMPTS, build_model, build_tokenizer

    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (tmp_path / "of_the_folder.py").write_text(REWARD)
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(SETTINGS))
    (tmp_path / "elsewhere").mkdir()
    return tmp_path


def test_a_run_of_a_yaml_file_is_stopped_and_continued_in_another_folder(of_trl: Path) -> None:
    flags = ["--reward_funcs", "of_the_folder.length", "-n", "1", "--max-staleness", "0"]
    env = {"XDG_CACHE_HOME": str(of_trl / "cache")}
    begun = Command(["train", "grpo.yaml", *flags], of_trl, **env)
    run = RunDir(of_trl / "worker")
    begun.wait_until(lambda: steps_logged(run.root), "a step")
    begun.process.send_signal(signal.SIGINT)
    assert begun.wait() == 0, begun.output
    state = run.read_state()
    assert state is not None and 0 < state.step < 400
    for written in (of_trl / "cache").rglob("*.py"):
        written.unlink()
    steps = ["--steps", str(state.step + 2)]
    resumed = Command(["train", "--resume", "--run-dir", "../worker", *steps], of_trl / "elsewhere", **env)
    assert resumed.wait() == 0, resumed.output
    after = run.read_state()
    assert after is not None and (after.state, after.step) == (FINISHED, state.step + 2)
    assert (of_trl / "out" / "model.safetensors").is_file(), "at the end of the training, as TRL's command"
    assert not (of_trl / "elsewhere" / "out").exists()


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
