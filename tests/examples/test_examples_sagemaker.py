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
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from async_grpo.evals.early_stopping import Best
from async_grpo.evals.estimators import Estimate
from async_grpo.evals.eval_ledger import Evaluated
from kit.waiting import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "sagemaker"
TINY = EXAMPLE.parent / "triviaqa_search"
DEADLINE_S = 300.0


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


@contextmanager
def started(root: Path, log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A job, which is killed at the end."""
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
        job = subprocess.Popen([sys.executable, EXAMPLE / "train.py"], env=env, stdout=output, stderr=output)
    try:
        yield job
    finally:
        job.kill()


def until_found(condition: Callable[[], Any], job: subprocess.Popen[bytes], log: Path) -> None:
    """Wait while the job runs."""
    until(condition, deadline_s=DEADLINE_S, process=job, said=log.read_text)


def ends_well(root: Path, log: Path, **more: str) -> None:
    """Start a job, and wait for its end."""
    with started(root, log, **more) as job:
        assert job.wait(DEADLINE_S) == 0, log.read_text()


FIGURES = {"success_rate": 0.25, "pass@1": 0.25, "pass@5": 1.0, "reward_mean": -0.125}
LAUNCH = ["--image", "123456789012.dkr.ecr.us-east-1.amazonaws.com/async-grpo:1", "--bucket", "s3://mine/jobs/"]
LAUNCH += ["--role", "arn:aws:iam::123456789012:role/training", "--name", "a-job"]


@pytest.fixture(scope="module")
def example() -> Iterator[SimpleNamespace]:
    """The modules of the folder, which are imported by their bare names there."""
    names = ("hyperparameters", "metrics", "train", "launch", "evaluate", "deploy")
    sys.path.insert(0, str(EXAMPLE))
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    sys.path.remove(str(EXAMPLE))
    for name in names:
        del sys.modules[name]


@pytest.fixture
def fails(example: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run a job in `tmp_path` that ends with this code; gives the reason that it has written down."""
    monkeypatch.setenv("SM_ROOT", str(tmp_path))

    def run(code: int = 2, options: Sequence[str] = ("--num_gpus=0", "--num_generations=8")) -> str:
        assert example.train.main([*options]) == code
        return (tmp_path / "output" / "failure").read_text()

    return run


# --- hyperparameters


def test_the_command_line_is_before_sm_hps_which_is_before_the_file(example: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    texts = {"seed": "1", "max_steps": '"2"', "beta": " 1e-6 ", "no_turn_reward": "TRUE", "sagemaker_program": "x"}
    (folder / "hyperparameters.json").write_text(json.dumps(texts))
    env = {"SM_HPS": json.dumps({"max_steps": 3, "learning_rate": "1e-5"})}
    values = example.hyperparameters.read(["--learning-rate=2e-5", "--trainer", "grpo"], env, tmp_path)
    assert values.credit == "outcome", "grpo with no_turn_reward is GRPO-OR"
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
        (["--trainer=ppo"], "trainer must be one of mt_grpo, grpo_merged, grpo_outcome, grpo, got 'ppo'"),
        (["--trainer=grpo_merged", "--no_turn_reward"], "no_turn_reward has no use with trainer=grpo_merged"),
        (["--trainer=grpo_outcome", "--turn_advantage_coef=2"], "turn_advantage_coef=2 has no use with trainer=grpo_o"),
        (["--no_turn_reward", "--turn_advantage_coef=2"], "turn_advantage_coef=2 has no use with no_turn_reward"),
        (["--accelerate_config=fsdp1"], "accelerate_config must be one of fsdp2, zero3, got 'fsdp1'"),
        (["--vllm_gpu_memory_utilization=1.2"], "must be over 0 and at most 1, got 1.2"),
        (["--max_model_len=512"], "max_model_len=512 leaves no room for a prompt"),
        (['--model_name="a"b"'], 'model_name is in quotes and not valid JSON: "a"b"'),
        (["--learning_rate=-1"], "learning_rate must be at least 0"),
        (["--early_stopping_patience=2", "--eval_every=30"], "eval_every=30 must be a multiple of save_steps=50"),
        (["7"], "'7' is no option"),
    ],
)
def test_bad_hyperparameters_are_sentences(
    example: SimpleNamespace, tmp_path: Path, options: list[str], sentence: str
) -> None:
    with pytest.raises(example.hyperparameters.Refused, match=re.escape(sentence)):
        example.hyperparameters.read(options, {}, tmp_path)


def test_each_trainer_is_a_credit(example: SimpleNamespace, tmp_path: Path) -> None:
    credits = {"mt_grpo": "turn", "grpo_merged": "merged", "grpo_outcome": "outcome", "grpo": "merged"}
    read = example.hyperparameters.read
    assert {trainer: read([f"--trainer={trainer}"], {}, tmp_path).credit for trainer in credits} == credits


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (b"{", "are no JSON"),
        (b"\xff\xfe", "are no JSON"),
        (b"[" * 100_000, "are no JSON"),
        (b"[1]", "must be an object of names and values"),
        (b'{"seed": {"a": 1}}', 'seed must be a text, a number or true or false, got {"a": 1}'),
    ],
)
def test_an_odd_file_of_hyperparameters_is_a_sentence(
    example: SimpleNamespace, tmp_path: Path, text: bytes, sentence: str
) -> None:
    folder = tmp_path / "input" / "config"
    folder.mkdir(parents=True)
    (folder / "hyperparameters.json").write_bytes(text)
    with pytest.raises(example.hyperparameters.Refused, match=re.escape(sentence)):
        example.hyperparameters.read([], {}, tmp_path)


# --- the layout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("model", "SM_CHANNELS must be a JSON list of names, got 'model'"),
        ('["remodelled"]', "There is no channel 'remodelled': the job reads model, index, training, evaluation."),
        ('["trainin"]', "Did you mean training?"),
    ],
)
def test_channels_are_read_as_json(example: SimpleNamespace, text: str, sentence: str) -> None:
    read = example.train.given_channels
    assert (read({"SM_CHANNELS": '["index", "model"]'}), read({})) == (["index", "model"], [])
    with pytest.raises(example.hyperparameters.Refused, match=re.escape(sentence)):
        read({"SM_CHANNELS": text})


def test_the_failure_has_the_sentence_and_of_the_log_what_fits(example: SimpleNamespace) -> None:
    noise, sentence = ["12:00:00 " + "x" * 500] * 5, "error: num_generations can be: 2, 4, 7."
    reason = example.train.ended_with(2, [*noise, sentence])
    assert reason.startswith("async-grpo train ended with exit code 2: num_generations can be: 2, 4, 7. Before it: …")
    assert len(reason) == example.train.REASON_CHARACTERS
    long = example.train.cut(example.train.ended_with(1, ["error: " + "long " * 500]))
    assert long.startswith("async-grpo train ended with exit code 1: long long") and len(long) == 1024
    assert example.train.ended_with(-9, []).strip() == "async-grpo train ended with exit code -9:"


def test_a_missing_channel_is_a_sentence_and_the_failure_of_the_job(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SM_CHANNEL_TRAINING", str(tmp_path / "input" / "data" / "training"))
    assert "The channel training was given" in fails()


def test_checkpoints_that_cannot_be_written_are_refused_before_the_training(
    fails: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way, as a read-only folder is to whoever is not root")
    assert "Checkpoints cannot be written" in fails()


def test_what_cannot_be_written_is_the_failure_of_the_job(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "job.json").mkdir(parents=True)
    assert "IsADirectoryError" in fails(code=1)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("--num_gpus=4", "are of a job with num_gpus=2, and this one has num_gpus=4"),
        ("--learning_rate=2e-6", "had other hyperparameters: learning_rate=2e-06 (was 1e-06)"),
    ],
)
def test_checkpoints_of_another_job_are_not_continued(
    example: SimpleNamespace, fails: Callable[..., str], tmp_path: Path, changed: str, sentence: str
) -> None:
    run, file = tmp_path / "checkpoints" / "run", tmp_path / "checkpoints" / "job.json"
    run.mkdir(parents=True)
    options = ["--num_gpus=2", "--num_generations=4"]
    read, check = example.hyperparameters.read, example.hyperparameters.check_same_job
    check(read(options, {}, tmp_path), file, begun=False)
    (run / "run.json").touch()
    check(read([*options, "--max_steps=400"], {}, tmp_path), file, begun=True)
    assert sentence in fails(options=[*options, changed])


def test_the_entry_point_needs_nothing_but_its_folder() -> None:
    """The service calls it with a path, from any folder."""
    env = {**os.environ, "SM_ROOT": "/proc/none", "PYTHONPATH": str(EXAMPLE.parents[1] / "src")}
    line = [sys.executable, EXAMPLE / "train.py", "--nothing=1"]
    ran = subprocess.run(line, env=env, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 2 and "There is no hyperparameter nothing" in ran.stderr
    assert "the reason could not be written" in ran.stderr


def test_early_stopping_needs_questions_that_are_not_trained_on(fails: Callable[..., str], tmp_path: Path) -> None:
    for channel in ("training", "index"):
        (tmp_path / "input" / "data" / channel).mkdir(parents=True)
    (tmp_path / "input" / "data" / "training" / "a.jsonl").write_text("{}")
    options = ["--num_gpus=0", "--num_generations=8", "--early_stopping_patience=2"]
    assert "needs the channel evaluation" in fails(options=options)


def test_the_trainer_has_all_gpus_but_the_last(example: SimpleNamespace, tmp_path: Path) -> None:
    kind = example.hyperparameters.Hyperparameters
    for given, sharded in (({}, "FSDP"), ({"accelerate_config": "zero3"}, "zero_stage: 3")):
        command = example.train.command(kind(**given), tmp_path)
        assert command[command.index("--worker-device-ids") + 1] == "7"
        config = Path(command[command.index("--accelerate-config") + 1]).read_text()
        assert "num_processes: 7\n" in config and "gpu_ids: 0,1,2,3,4,5,6\n" in config and sharded in config
    two = example.train.command(kind(num_gpus=2, num_generations=4), tmp_path)
    assert two[-4:] == ["--worker-device-ids", "1", "--master-device-id", "0"]
    assert (EXAMPLE / "zero3.yaml").read_text() == (EXAMPLE.parent / "accelerate" / "zero3.yaml").read_text()


# --- the request


def test_a_job_that_reports_to_a_tracker_gets_its_key_and_nobody_else_reads_it(
    example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, launch = [*LAUNCH, "--hyperparameter", "report_to=wandb"], example.launch
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert launch.main([*options, "--dry-run"]) == 2
    assert "report_to=wandb needs WANDB_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    request = launch.build_request(launch.arguments(options))
    launch.check(launch.arguments(options), request)
    assert request["Environment"]["WANDB_API_KEY"] == "0123456789abcdef" not in launch.shown(request)
    without = launch.build_request(launch.arguments(LAUNCH))
    assert without["Environment"] == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


def test_an_evaluation_has_the_hyperparameters_of_the_job(example: SimpleNamespace) -> None:
    line, env = example.evaluate.command(["out/model", "--num_gpus", "0", "--num_generations=8", "--eval-replicates=2"])
    assert line[3:5] == ["evaluate", "out/model"] and line[-3:] == ["--master-device-id", "cpu", "--eval-replicates=2"]
    assert (env["JOB_MODEL_NAME"], env["JOB_NUM_GENERATIONS"]) == ("out/model", "8")
    assert example.evaluate.main(["--num_gpus=0"]) == 2


def test_an_endpoint_serves_the_model_of_a_job(example: SimpleNamespace) -> None:
    options = ["--image", LAUNCH[1], "--role", LAUNCH[5], "--model-data", "s3://mine/model.tar.gz", "--name", "served"]
    requests = example.deploy.requests(example.deploy.arguments(options))
    assert [*requests] == ["CreateModel", "CreateEndpointConfig", "CreateEndpoint"]
    assert requests["CreateModel"]["PrimaryContainer"]["ModelDataUrl"] == "s3://mine/model.tar.gz"
    assert requests["CreateEndpoint"]["EndpointConfigName"] == "served"


def test_the_request_has_what_the_entry_point_expects(example: SimpleNamespace) -> None:
    """Whether the service takes it is tested where botocore is: `make test-sagemaker`."""
    options = [*LAUNCH, "--spot", "--hyperparameter", "num_generations=7"]
    request = example.launch.build_request(example.launch.arguments(options))
    where = {"S3Uri": "s3://mine/jobs/checkpoints/a-job", "LocalPath": "/opt/ml/checkpoints"}
    assert request["CheckpointConfig"] == where
    assert request["StoppingCondition"]["MaxWaitTimeInSeconds"] >= request["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert request["HyperParameters"]["num_generations"] == "7"
    assert len(request["AlgorithmSpecification"]["MetricDefinitions"]) <= 40


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--hyperparameter", "num_generations=16"], "num_generations can be: 2, 4, 7, 8, 14, 28, 56."),
        (["--channel", "trainin=s3://a/b"], "There is no channel 'trainin'"),
        (["--channel", "training=s3://a/b"], "need the channel index"),
        (["--instance", "ml.g6e.12xlarge", "--hyperparameter", "num_gpus=8"], "ml.g6e.12xlarge has 4 GPUs"),
    ],
)
def test_what_the_job_would_refuse_is_refused_before_anything_is_sent(
    example: SimpleNamespace, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    assert example.launch.main([*LAUNCH, *options]) == 2
    said = capsys.readouterr()
    assert "the job would refuse this" in said.err and sentence in said.err and said.out == ""


def test_an_instance_whose_gpus_are_not_known(example: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    other = [*LAUNCH, "--instance", "ml.g5.12xlarge"]
    with pytest.raises(SystemExit):
        example.launch.arguments(other)
    assert "--hyperparameter num_gpus=N" in capsys.readouterr().err
    given = example.launch.arguments([*other, "--hyperparameter", "num_gpus=4"])
    assert example.launch.build_request(given)["HyperParameters"] == {"num_gpus": "4"}


def test_the_sdk_signs_in_where_region_says(example: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    for name in ("", ".core", ".core.training", ".core.training.configs", ".train"):
        monkeypatch.setitem(sys.modules, f"sagemaker{name}", MagicMock())
    module = importlib.import_module("launch_sdk3")
    del sys.modules["launch_sdk3"]  # it has no SDK
    regions: list[str] = []
    monkeypatch.setattr(
        module, "ModelTrainer", lambda **_: regions.append(os.environ["AWS_DEFAULT_REGION"]) or MagicMock()
    )
    assert module.main([*LAUNCH, "--region", "eu-west-1", "--dry-run"]) == 0
    assert regions == ["eu-west-1"]


@pytest.mark.parametrize(("name", "count"), [("requirements.txt", 2), ("requirements-sdk3.txt", 4)])
def test_the_packages_are_pinned(name: str, count: int) -> None:
    lines = [line for line in (EXAMPLE / name).read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", line) for line in lines) and len(lines) == count


def test_the_metrics_of_an_evaluation_are_those_of_its_line_in_the_log(example: SimpleNamespace) -> None:
    figures = {name: Estimate(value=value, low=None, high=None, problems=40) for name, value in FIGURES.items()}
    about = {"run_id": "", "step": 20, "seconds": 1.0, "replicates": 5, "sampling": {}, "first_seq": 0, "tasks": {}}
    result = Evaluated(figures=figures, failed={}, knows_success=True, **about)
    line = f"12:00:00 evaluation of version 20: {result.in_words()}"
    found = {name: re.search(regex, line) for name, regex in example.metrics.METRICS.items() if name[:5] == "eval:"}
    assert {name: match[1] for name, match in found.items()} == {"eval:success_rate": "0.250", "eval:reward": "-0.125"}


def test_the_image_has_what_the_project_pins_and_asks_for_nothing_that_is_not_there() -> None:
    """hadolint reads it, too: `make test-sagemaker`."""
    text = (EXAMPLE / "Dockerfile").read_text()
    root = EXAMPLE.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = re.search(r"/opt/async-grpo\[([a-z0-9,]+)\]", text)
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    torch = re.search(r"^FROM pytorch/pytorch:([0-9.]+)-", text, re.MULTILINE)
    assert f"torch=={torch[1]}\n" in (root / "src/async_grpo/constraints.txt").read_text()
    for path in re.findall(r"/opt/async-grpo/([\w./-]+)", text):
        assert (root / path).exists(), path
    assert json.loads(text[text.index("ENTRYPOINT") + len("ENTRYPOINT") :]) == ["python", "train.py"]


# --- early stopping


def test_the_model_of_the_best_evaluation_is_kept(example: SimpleNamespace, tmp_path: Path) -> None:
    for step in (8, 10, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").write_text(str(step))
    for found, kept in ((Best(10, 0.5, 1), "10"), (Best(2, 0.5, 1), "12"), (None, "12")):
        example.train._export(tmp_path, tmp_path / "model", {}, best=found)
        assert (tmp_path / "model" / "config.json").read_text() == kept


@pytest.mark.slow
@pytest.mark.integration
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


# --- the container


def by_way_of_s3(checkpoints: Path, new: Path) -> None:
    """Only what S3 keeps: bytes of regular files, under their names; no modes, no empty folders, no pipes."""
    for path in checkpoints.rglob("*"):
        if path.is_file() and not path.is_symlink():
            target = new / path.relative_to(checkpoints)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)


@pytest.mark.slow
@pytest.mark.integration
def test_a_job_that_is_interrupted_is_continued_by_the_next(example: SimpleNamespace, tmp_path: Path) -> None:
    pytest.importorskip("bm25s", reason="the extra `search` is not installed")
    root, log = tmp_path / "ml", tmp_path / "log.txt"
    model_in(root / "input" / "data" / "model")
    with started(root, log) as job:
        until_found(lambda: list(root.glob("checkpoints/trainer/checkpoint-*")), job, log)
        job.send_signal(signal.SIGTERM)
        job.wait(DEADLINE_S)
    first = log.read_text()
    assert not (root / "output" / "failure").exists(), first
    assert not (root / "model").exists()
    again = root.with_name("again")
    by_way_of_s3(root / "checkpoints", again / "checkpoints")
    shutil.copytree(root / "input", again / "input")
    root.rename(root.with_name("gone"))
    again.rename(root)
    ends_well(root, log)
    second = log.read_text()
    steps = [int(step) for step in re.findall(example.metrics.METRICS["train:step"], second, re.MULTILINE)]
    assert steps and steps[0] > 1 and steps[-1] == 40
    missing = [
        name for name, one in example.metrics.METRICS.items() if not re.search(one, first + second, re.MULTILINE)
    ]
    assert not missing, second
    assert (root / "model" / "model.safetensors").is_file() and (root / "model" / "tokenizer.json").is_file()
    assert list(root.glob("model/*optimizer*")) == []
