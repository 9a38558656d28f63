"""The example for SageMaker: hyperparameters, the request, and a job that is played in a temporary root."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "sagemaker"
TINY = EXAMPLE.parent / "triviaqa_search"
DEADLINE_S = 300.0
LAUNCH = ["--image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/async-grpo:1", "--bucket", "s3://mine/jobs/"]
LAUNCH += ["--role", "arn:aws:iam::123456789012:role/training", "--name", "a-job"]


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which are imported by their bare names there."""
    names = ("hyperparameters", "metrics", "train", "launch")
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(EXAMPLE))
    for name in names:
        del sys.modules[name]


# --- hyperparameters


def test_the_command_line_is_before_sm_hps_which_is_before_the_file(example: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    texts = {"seed": "1", "max_steps": '"2"', "beta": " 1e-6 ", "no_turn_reward": "TRUE", "sagemaker_program": "x"}
    (folder / "hyperparameters.json").write_text(json.dumps(texts))
    env = {"SM_HPS": json.dumps({"max_steps": 3, "learning_rate": "1e-5"})}
    values = example.hyperparameters.read(["--learning-rate=2e-5", "--trainer", "grpo"], env, tmp_path)
    assert (values.seed, values.max_steps, values.beta, values.no_turn_reward) == (1, 3, 1e-6, True)
    assert (values.learning_rate, values.trainer, values.num_gpus) == (2e-5, "grpo", 8)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--num_gpus=1"], "the trainer and the worker's vLLM need a GPU each"),
        (["--num_generation=7"], "no hyperparameter num_generation. Did you mean num_generations?"),
        (["--beta=nan"], "beta must be a finite number, got 'nan'"),
        (["--max_steps=1e3"], "max_steps must be a whole number"),
        (["--no_turn_reward=perhaps"], "no_turn_reward must be true or false"),
        (["--num_generations=5"], "num_generations can be: 2, 4, 7, 8, 14, 28, 56."),
        (["--trainer=ppo"], "trainer must be mt_grpo or grpo"),
        (["--learning_rate=-1"], "learning_rate must be at least 0"),
        (["7"], "'7' is no option"),
    ],
)
def test_bad_hyperparameters_are_sentences(
    example: SimpleNamespace, tmp_path: Path, options: list[str], sentence: str
) -> None:
    with pytest.raises(example.hyperparameters.Refused, match=re.escape(sentence)):
        example.hyperparameters.read(options, {}, tmp_path)


@pytest.mark.parametrize(("text", "value"), [("False", False), ("TRUE", True), (" 0 ", False), ('"true"', True)])
def test_truth_as_text(example: SimpleNamespace, text: str, value: bool) -> None:
    assert example.hyperparameters.typed("no_turn_reward", text, bool) is value


# --- the layout


def test_a_missing_channel_is_a_sentence_and_the_failure_of_the_job(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_ROOT", str(tmp_path))
    monkeypatch.setenv("SM_CHANNEL_TRAINING", str(tmp_path / "input" / "data" / "training"))
    assert example.train.main(["--num_gpus=0", "--num_generations=8"]) == 2
    assert "The channel training was given" in (tmp_path / "output" / "failure").read_text()


def test_checkpoints_that_cannot_be_written_are_refused_before_the_training(
    example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").write_text("in the way, as a read-only folder is to whoever is not root")
    monkeypatch.setenv("SM_ROOT", str(tmp_path))
    assert example.train.main(["--num_gpus=0", "--num_generations=8"]) == 2
    assert "Checkpoints cannot be written" in (tmp_path / "output" / "failure").read_text()


def test_the_trainer_has_all_gpus_but_the_last(example: SimpleNamespace, tmp_path: Path) -> None:
    command = example.train.command(example.hyperparameters.Hyperparameters(), tmp_path)
    assert command[command.index("--worker-device-ids") + 1] == "7"
    config = Path(command[command.index("--accelerate-config") + 1]).read_text()
    assert "num_processes: 7\n" in config and "gpu_ids: 0,1,2,3,4,5,6\n" in config and "FSDP" in config
    two = example.train.command(example.hyperparameters.Hyperparameters(num_gpus=2, num_generations=4), tmp_path)
    assert two[-4:] == ["--worker-device-ids", "1", "--master-device-id", "0"]


# --- the request


def test_the_request_is_one_that_the_service_takes(
    example: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("botocore", reason="examples/sagemaker/requirements.txt is not installed")
    assert example.launch.main([*LAUNCH, "--spot", "--channel", "training=s3://mine/data", "--dry-run"]) == 0
    request = json.loads(capsys.readouterr().out)
    assert request["HyperParameters"] == {"num_gpus": "8"}
    request["ResourceConfig"]["InstanceCount"] = "one"
    assert "InstanceCount" in example.launch.problems(request)


def test_the_request_without_botocore(example: SimpleNamespace) -> None:
    request = example.launch.build_request(
        example.launch.arguments([*LAUNCH, "--spot", "--hyperparameter", "num_generations=7"])
    )
    assert request["CheckpointConfig"] == {
        "S3Uri": "s3://mine/jobs/checkpoints/a-job",
        "LocalPath": "/opt/ml/checkpoints",
    }
    assert request["StoppingCondition"]["MaxWaitTimeInSeconds"] >= request["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert request["HyperParameters"]["num_generations"] == "7"
    assert len(request["AlgorithmSpecification"]["MetricDefinitions"]) <= 40


def test_the_pinned_packages_are_named(example: SimpleNamespace) -> None:
    lines = [line for line in (EXAMPLE / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in lines) and len(lines) == 2


# --- the container


def model_in(folder: Path) -> None:
    sys.path.insert(0, str(TINY))
    try:
        tiny = importlib.import_module("tiny")
    finally:
        sys.path.remove(str(TINY))
        sys.modules.pop("tiny", None)
    tokenizer = tiny.build_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny.build_model(tokenizer).save_pretrained(folder)


def start(root: Path, log: Path, **more: str) -> subprocess.Popen[bytes]:
    texts = {"num_gpus": "0", "num_generations": "4", "grad_accum_steps": "1", "per_device_train_batch_size": "4"}
    texts |= {"num_iterations": "1", "max_completion_length": "24", "save_steps": "2", "max_steps": "40", **more}
    env: dict[str, Any] = {
        **os.environ,
        "SM_ROOT": str(root),
        "SM_HPS": json.dumps(texts),
        "SM_CHANNELS": '["model"]',
        "SM_CHANNEL_MODEL": str(root / "input" / "data" / "model"),
        "PYTHONPATH": f"{EXAMPLE.parents[1] / 'src'}:{os.environ.get('PYTHONPATH', '')}",
    }
    with log.open("wb") as output:
        return subprocess.Popen([sys.executable, EXAMPLE / "train.py"], env=env, stdout=output, stderr=output)


def by_way_of_s3(checkpoints: Path, new: Path) -> None:
    """Only what S3 keeps: bytes of regular files, under their names; no modes, no empty folders, no pipes."""
    for path in checkpoints.rglob("*"):
        if path.is_file() and not path.is_symlink():
            place = new / path.relative_to(checkpoints)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


@pytest.mark.slow
@pytest.mark.integration
def test_a_job_that_is_interrupted_is_continued_by_the_next(example: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    root, log = tmp_path / "ml", tmp_path / "log.txt"
    model_in(root / "input" / "data" / "model")
    job = start(root, log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not list(root.glob("checkpoints/trainer/checkpoint-*")):
            assert job.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        job.wait(DEADLINE_S)
    finally:
        job.kill()
    first = log.read_text()
    assert not (root / "output" / "failure").exists(), first
    assert not (root / "model").exists()
    again = root.with_name("again")
    by_way_of_s3(root / "checkpoints", again / "checkpoints")
    shutil.copytree(root / "input", again / "input")
    root.rename(root.with_name("gone"))
    again.rename(root)
    job = start(root, log)
    try:
        assert job.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        job.kill()
    second = log.read_text()
    steps = [int(step) for step in re.findall(example.metrics.METRICS["train:step"], second, re.MULTILINE)]
    assert steps and steps[0] > 1 and steps[-1] == 40
    for name, regex in example.metrics.METRICS.items():
        found = re.findall(regex, first + second, re.MULTILINE)
        assert found or name == "eval:reward", f"{name} is not in the log:\n{second}"
    assert (root / "model" / "model.safetensors").is_file() and (root / "model" / "tokenizer.json").is_file()
    assert list(root.glob("model/*optimizer*")) == []
