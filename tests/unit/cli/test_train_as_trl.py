"""`async-grpo train` with TRL's YAML file and flags: what becomes of them, and what is refused at once."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import async_grpo.launch.launcher as launcher
from async_grpo.cli import main
from async_grpo.errors import UsageError
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import STOPPED, RunDir
from async_grpo.rundir.run_plan import RunPlan, TRLCall
from async_grpo.rundir.summary import next_command
from async_grpo.setup.generated.trl_command import called_here, setup_file_of_run
from kit.commands import Says

YAML = "model_name_or_path: my/model\nlearning_rate: 1e-5\nenv: {OF_A_FILE: 3}\n"


class Launched(NamedTuple):
    run_dir: Path
    plan: RunPlan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OF_A_FILE", "")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "grpo.yaml").write_text(YAML)
    return work


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    runs: list[Launched] = []
    monkeypatch.setattr(launcher, "launch", lambda root, plan: runs.append(Launched(root, plan)) or 0)
    return runs


def begun(launched: Launched) -> RunDir:
    """A run directory with a stopped run of these options."""
    state = prepare(*launched)
    run = RunDir(launched.run_dir)
    run.update_state(of=state.run_id, state=STOPPED, step=1)
    return run


def test_a_yaml_file_with_flags_of_both(
    launched: list[Launched], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--reward-funcs", "accuracy_reward", "a.b", "--reward-weights", "1.0", "-0.5", "--delta", "0.5"]
    ours = ["--seed", "5", "--max_staleness", "0", "--lora-r=4"]
    assert main(["train", "-n", "3", "grpo.yaml", *flags, *ours]) == 0
    run = launched[0].plan
    assert (run.training.seed, run.training.max_staleness, len(run.worker_devices)) == (5, 0, 3)
    assert os.environ["OF_A_FILE"] == "3", "set before anything is started"
    arguments = ["--config", str(folder / "grpo.yaml"), *flags, "--lora-r=4"]
    assert run.trl == TRLCall(arguments, str(folder))
    assert run.config.stem.startswith("trl_grpo_")
    monkeypatch.setenv("OF_A_FILE", "of this process")
    command = vars(runpy.run_path(str(run.config))["get_trainer"].__self__)
    assert (command["_arguments"], command["_directory"]) == (arguments, str(folder))
    assert os.environ["OF_A_FILE"] == "of this process", "the launcher decides about devices, for one"


def test_flags_alone_and_the_file_as_trl_names_it(launched: list[Launched], folder: Path) -> None:
    assert main(["train", "--model_name_or_path", "m", "--use_peft", "--distributed"]) == 0
    assert launched[0].plan.trl.arguments == ["--model-name-or-path", "m", "--use-peft"]
    assert main(["train", "--config", "grpo.yaml", "-n", "2"]) == main(["train", "grpo.yaml", "-n", "2"]) == 0
    assert launched[1].plan.config == launched[2].plan.config


def test_a_resume_has_the_arguments_that_the_run_was_begun_with(
    launched: list[Launched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", "grpo.yaml", "--learning_rate", "3", "-n", "2"])
    run = begun(launched[0])
    launched[0].plan.config.unlink()  # the user has emptied the cache
    monkeypatch.setenv("OF_A_FILE", "")
    assert main(["train", "grpo.yaml", "--resume"]) == 0, "the file alone means the flags, too"
    assert os.environ["OF_A_FILE"] == "3"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_A_FILE", "")
    assert main(["train", "--resume", "--run-dir", str(run.root)]) == 0
    assert os.environ["OF_A_FILE"] == "3"
    assert launched[0].plan.config == launched[1].plan.config == launched[2].plan.config
    assert " train --run-dir " in next_command(STOPPED, run), "not the file in the cache"
    assert launched[0].plan.config.is_file(), "written again"
    state = run.read_state()
    assert state is not None and setup_file_of_run(state) == launched[0].plan.config
    assert launched[1].plan.trl == launched[0].plan.trl


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["other.yaml"], "Setup file not found"),
        (["mine.py", "--config", "mine.py"], "unrecognized arguments: mine.py"),
        (["--distribted"], "unrecognized arguments: --distribted. Did you mean --distributed?"),
        (["mine.py", "--learning_rate", "1"], "--learning-rate 1. With a Python file, or --resume, it is --set learni"),
        (["--model_name_or_path", "m", "--hub-tok", "x"], "--hub_token: run.json keeps the arguments"),
        (["grpo.yaml", "--resume_from_check=x"], "--resume_from_checkpoint: --resume continues a run"),
        (["--model_name_or_path", "m", "--lora_r", "hf_" + 34 * "a1"], "looks like a secret"),
        (["grpo.yaml", "--resume", "--lora_r", "4"], "--lora-r 4. Flags of `trl grpo` go with its YAML file"),
    ],
)
def test_refusals(given: list[str], said: str, launched: list[Launched], folder: Path, refused: Says) -> None:
    (folder / "mine.py").write_text("def get_trainer(): ...")
    assert said in refused("train", *given) and not launched


NO_YAML = "broken.yaml is not valid YAML: .*"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "Config file .*broken.yaml must contain a YAML mapping."),
        ("a: [", NO_YAML),
        ("[" * 3000, NO_YAML),
        ("output_dir: !!python/object/apply:os.system ['false']", NO_YAML),
        ("env: {A: &a [x], B: [*a, *a]}", "env: A has a list or a mapping"),
        ("env: 3", "`env` field should be a dict in the YAML file."),
        ("resume_from_checkpoint: true", "broken.yaml: resume_from_checkpoint: --resume continues a run"),
        ("env:\n  MY_PASSWORD: correct horse: battery", NO_YAML + "line 2, column 29: mapping values are not allowed"),
        ("hub_token: 'not closed, and a secret", NO_YAML + "found unexpected end of stream"),
        (f"{'x' * 60} battery-staple: a: b", NO_YAML + "mapping values are not allowed here"),
        ("a: *hf_battery01234567890123456789", NO_YAML + r"found undefined alias .\[removed\]"),
        ("a: \x01", NO_YAML + "special characters are not allowed"),
    ],
)
def test_what_is_wrong_with_a_yaml_file_is_named_and_not_quoted(text: str, said: str, folder: Path) -> None:
    (folder / "broken.yaml").write_text(text)
    with pytest.raises(UsageError, match=said) as refused:
        called_here(Path("broken.yaml"))
    assert "battery" not in str(refused.value) and "secret" not in str(refused.value)
    assert refused.value.__cause__ is None, "nor in a traceback"


@pytest.mark.parametrize(
    "command", ["server --config", "worker --config", "doctor --config", "sweep", "evaluate m --config"]
)
def test_every_command_with_a_setup_file_reads_a_yaml_file(command: str, folder: Path, refused: Says) -> None:
    (folder / "broken.yaml").write_text("- a")
    assert "must contain a YAML mapping" in refused(*command.split(), "broken.yaml")


def test_the_file_of_the_run_in_another_spelling_means_its_flags(launched: list[Launched], folder: Path) -> None:
    main(["train", "grpo.yaml", "--learning_rate", "3", "-n", "2"])
    begun(launched[0])
    (folder / "link.yaml").symlink_to("grpo.yaml")
    for spelled in ("../work/grpo.yaml", "link.yaml"):
        assert main(["train", spelled, "--resume"]) == 0
    assert launched[0].plan.config == launched[1].plan.config == launched[2].plan.config


def test_a_run_that_goes_on_with_a_python_file_forgets_the_yaml_file(
    launched: list[Launched], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main(["train", "grpo.yaml", "-n", "2"])
    run = begun(launched[0])
    (folder / "mine.py").write_text("def get_trainer(): ...")
    assert main(["train", "mine.py", "--resume"]) == 0
    run.update_state(of=prepare(run.root, launched[1].plan).run_id, undo=None)  # a server has accepted it
    (folder / "grpo.yaml").unlink()
    monkeypatch.setenv("OF_A_FILE", "")
    assert main(["train", "--resume"]) == 0
    assert launched[2].plan.config == folder / "mine.py" and os.environ["OF_A_FILE"] == ""


def test_a_server_by_hand_keeps_the_arguments(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from async_grpo.cli.compute import server

    prepared: list[Any] = []
    monkeypatch.setattr(server, "_prepare", lambda args, plan: prepared.append(plan) or sys.exit(0))
    with pytest.raises(SystemExit):
        main(["server", "--config", "grpo.yaml"])
    assert prepared[0].trl == TRLCall(["--config", str(folder / "grpo.yaml")], str(folder))


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: Says) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "grpo.yaml"))
    said = refused("train", "grpo.yaml", "-n", "2")
    assert "cannot be written into" in said and "Set XDG_CACHE_HOME" in said
