"""The scripts with names that users of GRAIL know do what those did."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from async_grpo.cli.compute import train
from async_grpo_experiments.cli.sweep import _sweep, build_parser
from kit.scripts import module_at
from kit.waiting import DEADLINE_S, until

SCRIPTS = Path(__file__).parents[3] / "scripts"

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
    return module_at(SCRIPTS / f"{name}.py")


def test_the_parallel_one_exports_the_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parallel = script("run_parallel_training", monkeypatch)
    assert parallel.SEEDS == [42, 1337, 2024, 9999]
    parallel.SEEDS = [5, 6, 7]  # as users of the original do in the file
    given = ["--dataset", "gsm8k", "--num-instances", "2"]
    setup = str(SCRIPTS.parent / "src" / "app" / "trainer_setup_dataset.py")
    added = [setup, "--seeds", "5,6", "--delta-every", "1", "--output-base", "outputs"]
    assert parallel.command(given) == ["sweep", *given, *added]
    assert parallel.command(["--resume"]) == ["sweep", "--resume"]
    mine = ["mine.py", "--seeds", "1", "--delta-every", "0", "--output-base", "elsewhere"]
    assert parallel.command(mine) == ["sweep", *mine]


def test_a_second_start_of_the_parallel_one_writes_below_run2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parallel = script("run_parallel_training", monkeypatch)
    given = ["--dataset", "gsm8k", "--seeds", "1,2"]
    for base in ("outputs", "run2/outputs", "run3/outputs"):
        command = parallel.command(given)
        assert command[-2:] == ["--output-base", base]
        sweep = _sweep(build_parser().parse_args(command[1:]))
        assert (str(sweep.log_folder), str(sweep.kept_folder)) == (
            str(Path(base).parent / "logs" / "parallel_training"),
            str(Path(base).parent / "checkpoints"),
        )
        sweep.runs[1].output.mkdir(parents=True)


def test_the_single_one_is_a_command_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
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
    assert (args.delta_every, Path(args.delta_dir)) == (1, tmp_path / "checkpoints" / "deltas_math_s")
    assert args.config.is_absolute() and args.config.is_file(), "from any folder"
    for state, base in (("stopped", "."), ("finished", "run2")):
        progress = {"state": state, "step": 3, "total_steps": 3, "saved": 3}
        (tmp_path / "outputs" / "trl_math_s" / "run").mkdir(parents=True, exist_ok=True)
        (tmp_path / "outputs" / "trl_math_s" / "run" / "plain_trl.json").write_text(json.dumps(progress))
        command = script("train_trl_grpo", monkeypatch).command()
        args = train.build_parser().parse_args(command[1:])
        assert args.run_dir == Path(base, "outputs", "trl_math_s", "run"), "a run that was stopped is continued"


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
    assert given == "--dataset gsm8k --run-suffix test_instance --base . --steps 5 --device cpu"
    (tmp_path / "outputs" / "trl_gsm8k_test_instance").mkdir(parents=True)
    process = instance(tmp_path, CODE=code)
    process.communicate(timeout=DEADLINE_S)
    assert "--base run2" in (tmp_path / "arguments").read_text()
    assert (tmp_path / "run2" / "logs" / "test_instance" / "training.log").is_file()
    assert ("passed" in said) == (code == "0") and ("error: no luck" in said) == (code != "0")


def test_a_single_instance_ends_what_it_started(tmp_path: Path) -> None:
    (tmp_path / "hang").touch()
    process = instance(tmp_path)
    log = tmp_path / "logs" / "test_instance" / "training.log"
    until(lambda: log.exists() and log.read_text(), "its first line")
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 143
    assert not psutil.wait_procs([child], timeout=DEADLINE_S)[1]
