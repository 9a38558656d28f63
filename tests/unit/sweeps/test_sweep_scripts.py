"""The scripts with names that users of GRAIL know do what those did."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from async_grpo.cli.compute import train

SCRIPTS = Path(__file__).parents[3] / "scripts"
DEADLINE_S = 60.0
FAKE_PYTHON = """#!/bin/sh
echo "$@" > arguments
echo $$ > pid
echo training
if [ -e hang ]; then exec sleep 1000; fi
echo "error: no luck"
exit ${CODE:-0}
"""


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parallel_one_exports_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = script("run_parallel_training", monkeypatch)
    assert parallel.SEEDS == [42, 1337, 2024, 9999]
    parallel.SEEDS = [5, 6, 7]  # as users of the original do in the file
    assert parallel.command(["--num-instances", "2"])[-2:] == ["--seeds", "5,6"]
    assert parallel.command(["--seeds", "1"]) == ["sweep", "--seeds", "1"]
    assert parallel.command(["--resume"]) == ["sweep", "--resume"]


def test_the_single_one_is_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET", "mbpp")
    given = ["--seed", "7", "--vllm-port", "8001", "--group-port", "51300", "--run-suffix", "s", "--steps", "3"]
    monkeypatch.setattr(sys, "argv", ["train_trl_grpo.py", "--dataset", "math", *given])
    command = script("train_trl_grpo", monkeypatch).command()
    args = train.build_parser().parse_args(command[1:])
    assert (command[0], args.seed, args.steps, args.device) == ("train", 7, 3, "0")
    assert (str(args.run_dir), args.run_name) == ("outputs/trl_math_s/run", "trl_math_s")
    assert args.set == {
        "output_dir": "outputs/trl_math_s",
        "use_vllm": "true",
        "vllm_mode": "server",
        "vllm_server_port": "8001",
        "vllm_group_port": "51300",
    }
    assert os.environ["DATASET"] == "math"


def test_the_single_one_leaves_vllm_to_the_setup_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET", "mbpp")
    monkeypatch.setattr(sys, "argv", ["train_trl_grpo.py"])
    assert script("train_trl_grpo", monkeypatch).command().count("--set") == 1
    monkeypatch.setattr(sys, "argv", ["train_trl_grpo.py", "--group-port", "51300"])
    with pytest.raises(SystemExit):
        script("train_trl_grpo", monkeypatch).command()


def instance(folder: Path, **env: str) -> subprocess.Popen[str]:
    python = folder / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return subprocess.Popen(
        [str(SCRIPTS / "test_single_instance.sh"), "gsm8k", "--device", "cpu"],
        cwd=folder,
        env={**os.environ, "PYTHON": str(python), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("code", ["0", "3"])
def test_a_single_instance_passes_or_says_its_last_words(tmp_path: Path, code: str) -> None:
    process = instance(tmp_path, CODE=code)
    said, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == int(code)
    given = (tmp_path / "arguments").read_text().split(maxsplit=1)[1].strip()
    assert given == "--dataset gsm8k --run-suffix test_instance --steps 5 --device cpu"
    assert ("passed" in said) == (code == "0") and ("error: no luck" in said) == (code != "0")


def test_a_single_instance_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    process = instance(tmp_path)
    deadline = time.monotonic() + DEADLINE_S
    log = tmp_path / "logs" / "parallel_training" / "training_test_instance.log"
    while not (log.exists() and log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert not psutil.wait_procs([child], timeout=DEADLINE_S)[1]
