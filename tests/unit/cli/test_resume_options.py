"""`--resume` continues with the options that the run was begun with, and says what was given otherwise."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.cli.compute import server, train
from async_grpo.cli.parser import Parser
from async_grpo.launch import launcher
from async_grpo.launch.launcher import LaunchOptions
from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.setup import devices

BEGUN = shlex.split("-n 3 --steps 30 --max-staleness 2 --seed 7 --keep-done 2GB --eval-k 1,5 --worker-timeout 9")
BEGUN += ["--set", "learning_rate=1e-5", "--set", "reward_weights=[1, 2]"]
Launched = list[LaunchOptions]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What would be launched. A launch prepares its run directory, and leaves a stopped run at step 5."""
    found: Launched = []

    def launch(options: LaunchOptions) -> int:
        found.append(options)
        resume, kept = options.training.resume, options.kept
        prepare(options.run_dir, config=options.config, resume=resume, num_workers=3, options=kept)
        RunDir(options.run_dir).update_state(state=runs.STOPPED, step=5, undo={})
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    for name in ("my trainer.py", "other.py"):
        (tmp_path / name).write_text("def get_trainer(): ...\n")
    return found


def same_but_resumed(first: LaunchOptions, second: LaunchOptions) -> bool:
    changed = {**_fields(second.training), "resume": False}
    return changed == _fields(first.training) and _fields(second, "training") == _fields(first, "training")


def _fields(value: Any, *without: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__ if name not in without}


@pytest.mark.parametrize("command", [["train", "--resume"], ["train", "my trainer.py", "--distributed", "--resume"]])
def test_a_plain_resume_has_every_option_of_the_run(launched: Launched, command: list[str]) -> None:
    assert main(["train", "my trainer.py", *BEGUN, "--quiet"]) == 0
    assert main(command) == 0
    first, second = launched
    assert same_but_resumed(first, second)
    assert (second.training.steps, str(second.training.keep_done), second.worker_timeout_s) == (30, "2000000KB", 9.0)


def test_a_command_line_is_parsed_once(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    parse = Parser.parse_known_args
    monkeypatch.setattr(Parser, "parse_known_args", lambda self, *given: parsed.append(given) or parse(self, *given))
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    assert main(["train", "--resume"]) == 0
    assert len(parsed) == 2


def test_the_printed_command_continues_the_run_as_it_was(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "program", lambda: "async-grpo")
    assert main(["train", "my trainer.py", *BEGUN, "--run-dir", "run dir"]) == 0
    typed = shlex.split(summary.next_command(runs.STOPPED, RunDir(Path("run dir"))))
    assert main(typed[1:]) == 0
    assert same_but_resumed(*launched)


def test_what_may_change_is_changed_and_said(launched: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    assert main(["train", "other.py", "--resume", "--steps", "50", "--max-staleness", "2", "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "--steps 50 from now on; the run was begun with --steps 30" in said
    assert "--quiet from now on; the run was begun without this option" in said
    assert "the setup file is other.py from now on" in said
    assert "--max-staleness" not in said, "it agrees"
    assert main(["train", "--resume"]) == 0
    assert launched[-1].training.steps == 50, "the next resume continues from there"
    assert launched[-1].config.name == "other.py"


def test_values_of_the_configuration_are_kept_one_by_one(
    launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    assert main(["train", "--resume", "--set", "learning_rate=2e-5", "--set", "beta=0.1"]) == 0
    said = capsys.readouterr().out
    assert "--set learning_rate=2e-5 from now on; it was 1e-5" in said
    assert "--set beta=0.1 from now on; the run was begun without this value" in said
    assert main(["train", "--resume"]) == 0
    assert launched[-1].training.set == {"learning_rate": "2e-5", "reward_weights": "[1, 2]", "beta": "0.1"}


@pytest.mark.parametrize(
    "given", [["--seed", "8"], ["--correction", "tis"], ["--deterministic"], ["--filter-zero-variance"]]
)
def test_what_cannot_change_is_refused_and_nothing_is_started(
    launched: Launched, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    before = Path("worker/run.json").read_bytes()
    assert main(["train", "--resume", *given]) == 2
    error = capsys.readouterr().err
    assert "was begun with" in error and f"leave {given[0]} out" in error
    assert len(launched) == 1 and Path("worker/run.json").read_bytes() == before
    assert main(["train", "--resume", "--seed", "7"]) == 0, "it agrees"


def test_a_number_of_workers_takes_the_place_of_their_devices(launched: Launched) -> None:
    assert main(["train", "my trainer.py", "--worker-device-ids", "cpu,cpu"]) == 0
    assert main(["train", "--resume", "-n", "1"]) == 0
    assert [len(options.worker_devices) for options in launched] == [2, 1]


def test_a_run_that_a_server_by_hand_began_continues_with_a_launcher(launched: Launched) -> None:
    kept = {"device": "cpu", "steps": 30, "evaluate": None}
    prepare(Path("worker"), config=Path("my trainer.py"), options=kept)
    assert main(["train", "--resume"]) == 0
    assert launched[-1].training.steps == 30
    assert main(["train", "--resume", "--device", "cpu"]) == 2, "that is for one process"


def test_a_trainer_of_several_processes_can_go_on_as_one(
    launched: Launched, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ddp.yaml").write_text("num_processes: 2\n")
    assert main(["train", "my trainer.py", "-n", "1", "--accelerate-config", "ddp.yaml"]) == 0
    assert main(["train", "--resume", "--accelerate-config", "none"]) == 0
    assert "without --accelerate-config from now on; the run was begun with" in capsys.readouterr().out
    assert launched[-1].accelerate_config is None


@pytest.mark.parametrize("command", [train, server])
def test_a_finished_run_has_nothing_to_do(launched: Launched, command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    RunDir(Path("worker")).update_state(state=runs.FINISHED, step=30)
    before = Path("worker/run.json").read_bytes()
    name = command.__name__.rpartition(".")[2]
    assert main([name, "--resume"]) == 0
    assert "nothing to do: run" in capsys.readouterr().out
    assert len(launched) == 1 and Path("worker/run.json").read_bytes() == before
    assert main(["train", "--resume", "--steps", "31"]) == 0
    assert launched[-1].training.steps == 31


def _without_options(state: dict[str, Any]) -> None:
    del state["options"], state["resolved"]


def _unknown_option(state: dict[str, Any]) -> None:
    state["options"]["colour"] = "red"


@pytest.mark.parametrize("change", [_without_options, _unknown_option])
def test_a_record_of_another_version_of_ours(launched: Launched, change: Callable[[dict[str, Any]], None]) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    path = Path("worker/run.json")
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    assert main(["train", "--resume", "-n", "3"]) == 0


@pytest.mark.parametrize(
    ("name", "value"), [("steps", "many"), ("correction", "magic"), ("keep_done", [1]), ("worker_timeout", -1)]
)
def test_an_option_that_cannot_be_read_is_named(
    launched: Launched, name: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    path = Path("worker/run.json")
    state = json.loads(path.read_text())
    state["options"][name] = value
    path.write_text(json.dumps(state))
    assert main(["train", "--resume"]) == 2
    assert f"run.json has {value!r} for --{name.replace('_', '-')}" in capsys.readouterr().err


def test_a_resume_that_was_not_accepted_leaves_no_option_behind(launched: Launched, tmp_path: Path) -> None:
    """Not even one that was killed while the server loaded."""
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    RunDir(tmp_path / "worker").update_state(state=runs.FINISHED, step=30)
    for config in ("ddp.yaml", "fsdp.yaml"):
        refused = {"accelerate_config": str(tmp_path / config), "steps": 50}
        prepare(tmp_path / "worker", config=Path("other.py"), resume=True, num_workers=7, options=refused)
    assert main(["train", "--resume", "-q"]) == 0, "it has nothing to do"
    assert len(launched) == 1
    assert main(["train", "--resume", "-q", "--steps", "40"]) == 0
    assert (launched[-1].accelerate_config, launched[-1].training.steps) == (None, 40)
    assert launched[-1].config.name == "my trainer.py"


def test_a_path_means_the_same_in_another_folder(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddp.yaml").write_text("num_processes: 2\n")
    assert main(["train", "my trainer.py", "-n", "1", "--accelerate-config", "ddp.yaml"]) == 0
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", "--resume", "--run-dir", "../worker"]) == 0
    assert launched[-1].accelerate_config == tmp_path / "ddp.yaml"
    assert launched[-1].config == tmp_path / "my trainer.py"
