"""The trainer of `trl grpo`: the same losses as TRL's own command, its refusals, and what of TRL we rely on for it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from trl.scripts import grpo

from async_grpo.cli.compute.train import build_parser
from async_grpo.errors import AsyncGRPOError
from async_grpo.rundir.paths import FINISHED, RunDir
from async_grpo.setup.generated.trl_command import TRLCommand
from async_grpo.training.trl_trainer import fit
from kit.compared_with_trl import largest_difference
from kit.in_process import InProcessRun, training_logs
from kit.recorded_batches import replaying
from kit.runs import Command, steps_logged
from kit.tiny_trainer import PROMPTS, build_model, build_tokenizer

REWARD = "def letters(completions, **_): return [sum(map(str.islower, it)) / max(1, len(it)) for it in completions]"
SETTINGS = {
    "model_name_or_path": "model",
    "dtype": "float32",
    "reward_funcs": ["trl_command_reward.letters"],
    "datasets": [{"path": "json", "data_files": "rows.jsonl"}],
    "output_dir": "out",
    "max_steps": 3,
    "seed": 3,
    "per_device_train_batch_size": 8,
    "num_generations": 2,
    "max_completion_length": 8,
    "learning_rate": "1e-3",
    "adam_epsilon": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
    "env": {"OF_THE_YAML_FILE": 7},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user of `trl grpo` has: a YAML file, a model, rows, a module of rewards."""
    folder = tmp_path_factory.mktemp("of_trl")
    tokenizer = build_tokenizer()
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    (folder / "trl_command_reward.py").write_text(REWARD)
    (folder / "grpo.yaml").write_text(yaml.safe_dump(SETTINGS))
    return folder


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a run may work in another folder than that of the command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_YAML_FILE", "restored")
    monkeypatch.delenv("OF_THE_YAML_FILE")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend("")


def command_of(folder: Path, *flags: str) -> TRLCommand:
    return TRLCommand(["--config", str(folder / "grpo.yaml"), *flags], directory=str(folder))


def trained_by_trl(folder: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], *flags: str) -> Any:
    """The trainer of TRL's own script, after it has trained; `given`: more arguments of the trainer."""
    made: list[Any] = []

    class Given(trl.GRPOTrainer):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments, **given)
            made.append(self)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(trl, "GRPOTrainer", Given)
    grpo.main(*grpo.make_parser().parse_args_and_config(["--config", "grpo.yaml", *flags]))
    (trainer,) = made
    return trainer


PEFT = ("--use_peft", "--lora_dropout=0", "--lora_target_modules", "q_proj", "v_proj", "--learning_rate=2e-3")


@pytest.mark.parametrize("flags", [(), PEFT])
def test_the_losses_are_those_of_trls_command(
    flags: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*flags, "--output_dir", str(tmp_path / "out"))
    command = command_of(folder, *flags)
    assert os.environ["OF_THE_YAML_FILE"] == "7"
    run = InProcessRun(command.trainer).train()
    assert any((tmp_path / "out").glob("*model.safetensors")), "the model is saved at the end, as TRL's command does"
    recorded = iter(run.batches)
    plain = trained_by_trl(folder, monkeypatch, {"rollout_func": replaying(recorded)}, *flags)
    assert next(recorded, None) is None and len(run.logs) == 3
    assert any(entry["loss"] != 0 for entry in run.logs)
    largest_difference(run.logs, training_logs(plain))


def test_a_run_that_was_killed_before_its_model_was_saved_saves_it_on_resume(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    flags = ("--output_dir", str(output), "--max_steps", "1", "--save_strategy", "steps", "--save_steps", "1")
    InProcessRun(command_of(folder, *flags).trainer).train()
    (saved,) = output.glob("*model.safetensors")
    weights = saved.read_bytes()
    saved.unlink()
    again = InProcessRun(command_of(folder, *flags).trainer)
    assert not fit(again.trainer, resume_from=output / "checkpoint-1"), "there was nothing to train"
    assert saved.read_bytes() == weights


@pytest.mark.slow
def test_a_run_of_a_yaml_file_is_stopped_and_continued_in_another_folder(folder: Path, tmp_path: Path) -> None:
    of_trl = Path(shutil.copytree(folder, tmp_path / "of_trl"))
    (tmp_path / "elsewhere").mkdir()
    flags = ["--max_steps", "400", "--save_strategy", "steps", "-n", "1", "--max-staleness", "0"]
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
    resumed = Command(["train", "--resume", "--run-dir", str(run.root), *steps], tmp_path / "elsewhere", **env)
    assert resumed.wait() == 0, resumed.output
    after = run.read_state()
    assert after is not None and (after.state, after.step) == (FINISHED, state.step + 2)
    assert (of_trl / "out" / "model.safetensors").is_file(), "at the end of the training, as TRL's command"
    assert not (tmp_path / "elsewhere" / "out").exists()


def refused(call: Callable[[], Any]) -> str:
    with pytest.raises((AsyncGRPOError, ValueError, SystemExit)) as error:
        call()
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--learning_rate", "fast"], "argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--reward_funcs", "no_such"], "Could not load reward function 'no_such'. Expected one of ['accuracy_reward'"),
        (["--load_best_model_at_end", "--save_strategy", "steps"], "requires the save and eval strategy to match"),
        (["--learning_rat", "3", "--per_device_batch", "7"], "unrecognized arguments: --per_device_batch"),
        (["--distribted"], "unrecognized arguments: --distribted. Did you mean distributed?"),
        (["--num_processes", "2"], "unrecognized arguments: --num_processes. `trl grpo` passes it on to `accelerate"),
        (["a_stray_word"], "unrecognized arguments: a_stray_word"),
    ],
)
def test_what_trl_refuses_is_refused_in_its_words(
    flags: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said in refused(command_of(folder, *flags).trainer)
    if "unrecognized" in said:  # TRL's launcher hands them on to accelerate's parser, which says so
        return
    monkeypatch.chdir(folder)
    theirs = refused(lambda: grpo.main(*grpo.make_parser().parse_args_and_config(["--config", "grpo.yaml", *flags])))
    assert said in theirs + capsys.readouterr().err


def test_without_a_dataset(folder: Path) -> None:
    words = "Either `datasets` or `dataset_name` must be provided."
    with pytest.raises(ValueError, match=words):
        TRLCommand(["--model_name_or_path", "model", "--use_cpu", "--bf16", "false"], str(folder)).trainer()


def test_a_trl_that_makes_no_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_YAML_FILE", "of the launcher")
    monkeypatch.setattr(grpo, "main", lambda *arguments: None)
    with pytest.raises(AsyncGRPOError, match="this version of TRL builds it in another way"):
        command_of(folder).trainer()
    assert os.environ["OF_THE_YAML_FILE"] == "of the launcher", "what it has decided stays"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rat: 1", "unrecognized arguments: --learning_rat. Did you mean learning_rate?"),
        ("accelerate_config: fsdp2", "see --accelerate-config FILE"),
        ("1: 2", "keywords must be strings"),
    ],
)
def test_a_key_that_trl_does_not_have(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    assert said in refused(TRLCommand(["--config", "broken.yaml"], str(tmp_path)).trainer)


def test_flags_of_train_and_of_trl() -> None:
    theirs, ours = grpo.make_parser(), {action.dest for action in build_parser()._actions}
    shared = ours & {action.dest for action in theirs._actions}
    assert shared == {"help", "seed", "run_name", "log_level"}, "docs/trl_command.md lists them"
    flags = theirs._option_string_actions
    assert {flag.replace("_", "-") for flag in flags} <= set(flags), "as train passes them on"
