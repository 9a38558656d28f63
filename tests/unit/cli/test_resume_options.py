"""`--resume` continues with the options that the run was begun with, and says what was given otherwise."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.cli.compute import server
from async_grpo.cli.parser import Parser
from async_grpo.launch import launcher
from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.run_plan import RunPlan
from kit.commands import Says
from kit.plans import planned

BEGUN = shlex.split("-n 3 --steps 30 --max-staleness 2 --seed 7 --keep-done 2GB --eval-k 1,5 --worker-timeout 9")
BEGUN += ["--set", "learning_rate=1e-5", "--set", "reward_weights=[1, 2]"]
Launched = list[RunPlan]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see_gpus: Any) -> Launched:
    """What would be launched. A launch prepares its run directory, and leaves a stopped run at step 5."""
    found: Launched = []

    def launch(root: Path, plan: RunPlan) -> int:
        found.append(plan)
        prepare(root, plan)
        RunDir(root).update_state(state=runs.STOPPED, step=5, undo=None)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "launch", launch)
    see_gpus(0)
    for name in ("my trainer.py", "other.py"):
        (tmp_path / name).write_text("def get_trainer(): ...\n")
    return found


@pytest.fixture
def begun(launched: Launched) -> Launched:
    """A stopped run with the options `BEGUN`."""
    assert main(["train", "my trainer.py", *BEGUN]) == 0
    return launched


def same_but_resumed(first: RunPlan, second: RunPlan) -> bool:
    return first == replace(second, training=replace(second.training, resume=False))


@pytest.mark.parametrize("command", [["train", "--resume"], ["train", "my trainer.py", "--distributed", "--resume"]])
def test_a_plain_resume_has_every_option_of_the_run(launched: Launched, command: list[str]) -> None:
    assert main(["train", "my trainer.py", *BEGUN, "--quiet"]) == 0
    assert main(command) == 0
    first, second = launched
    assert same_but_resumed(first, second)
    training, launch = second.training, second.launch
    assert (training.steps, str(training.keep_done), launch.worker_timeout) == (30, "2000000KB", 9.0)


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
    assert main(shlex.split(summary.next_command(runs.STOPPED, RunDir(Path("run dir"))))[1:]) == 0
    assert same_but_resumed(*launched)


def test_the_printed_command_has_the_place_of_machine_0_and_names_the_others(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "program", lambda: "async-grpo")
    (config := tmp_path / "two.yaml").write_text("num_machines: 2\nnum_processes: 2\n")
    place = ("--main-process", "gpu0:29500", "--machine-rank", "0")
    assert main(["train", "my trainer.py", "-n", "1", "--accelerate-config", str(config), *place]) == 0
    command, _, more = summary.next_command(runs.STOPPED, RunDir(Path("worker"))).partition("  # ")
    assert command.endswith("--resume " + " ".join(place)) and "on each other machine its own command" in more
    assert main(shlex.split(command)[1:]) == 0
    assert same_but_resumed(*launched)


def test_what_may_change_is_changed_and_said(begun: Launched, printed: Says) -> None:
    said = printed("train", "other.py", "--resume", "--steps", "50", "--max-staleness", "2", "--quiet")
    assert "--steps 50 from now on; the run was begun with --steps 30" in said
    assert "--quiet from now on; the run was begun without this option" in said
    assert "the setup file is other.py from now on" in said
    assert "--max-staleness" not in said, "it agrees"
    assert main(["train", "--resume"]) == 0
    assert begun[-1].training.steps == 50, "the next resume continues from there"
    assert begun[-1].config.name == "other.py"


def test_values_of_the_configuration_are_kept_one_by_one(begun: Launched, printed: Says) -> None:
    said = printed("train", "--resume", "--set", "learning_rate=2e-5", "--set", "beta=0.1")
    assert "--set learning_rate=2e-5 from now on; it was 1e-5" in said
    assert "--set beta=0.1 from now on; the run was begun without this value" in said
    assert main(["train", "--resume"]) == 0
    assert begun[-1].training.set == {"learning_rate": "2e-5", "reward_weights": "[1, 2]", "beta": "0.1"}


@pytest.mark.parametrize(
    "given",
    [["--seed", "8"], ["--correction", "tis"], ["--deterministic"], ["--filter-zero-variance"], ["--choose-prompts"]],
)
def test_what_cannot_change_is_refused_and_nothing_is_started(begun: Launched, given: list[str], refused: Says) -> None:
    before = Path("worker/run.json").read_bytes()
    error = refused("train", "--resume", *given)
    assert "was begun with" in error and f"leave {given[0]} out" in error
    assert len(begun) == 1 and Path("worker/run.json").read_bytes() == before
    assert main(["train", "--resume", "--seed", "7"]) == 0, "it agrees"


def test_a_number_of_workers_takes_the_place_of_their_devices(launched: Launched) -> None:
    assert main(["train", "my trainer.py", "--worker-device-ids", "cpu,cpu"]) == 0
    assert main(["train", "--resume", "-n", "1"]) == 0
    assert [len(options.worker_devices) for options in launched] == [2, 1]


def test_a_run_that_a_server_by_hand_began_continues_with_a_launcher(launched: Launched) -> None:
    prepare(Path("worker"), planned(Path("my trainer.py"), steps=30, master_device_id="cpu"))
    assert main(["train", "--resume"]) == 0
    assert launched[-1].training.steps == 30
    assert main(["train", "--resume", "--device", "cpu"]) == 2, "that is for one process"


def test_a_server_by_hand_is_where_it_was_and_says_where_it_goes(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, see_gpus: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    see_gpus(2)
    monkeypatch.setattr(server, "_prepare", lambda args, plan: launched.append(plan) or prepare(args.run_dir, plan))
    monkeypatch.setattr(server.options, "become_role", lambda *_, **__: sys.exit(0))
    for flags in (["--config", "my trainer.py", "-d", "1"], ["--resume"], ["--resume", "-d", "cpu"]):
        with pytest.raises(SystemExit):
            main(["server", *flags])
        RunDir(Path("worker")).update_state(state=runs.STOPPED, step=5, undo=None)
    assert [plan.master_device for plan in launched] == ["1", "1", "cpu"]
    assert "--master-device-id cpu from now on; the run was begun with --master-device-id 1" in capsys.readouterr().out


def test_a_trainer_of_several_processes_can_go_on_as_one(launched: Launched, tmp_path: Path, printed: Says) -> None:
    (tmp_path / "ddp.yaml").write_text("num_processes: 2\n")
    assert main(["train", "my trainer.py", "-n", "1", "--accelerate-config", "ddp.yaml"]) == 0
    said = printed("train", "--resume", "--accelerate-config", "none")
    assert "without --accelerate-config from now on; the run was begun with" in said
    assert launched[-1].launch.accelerate_config is None


@pytest.mark.parametrize("command", ["train", "server"])
@pytest.mark.parametrize(("state", "more"), [(runs.FINISHED, []), (runs.STOPPED, ["--steps", "29"])])
def test_a_run_that_has_done_all_steps_has_nothing_to_do(
    begun: Launched, command: str, state: str, more: list[str], printed: Says
) -> None:
    RunDir(Path("worker")).update_state(state=state, step=30)
    before = Path("worker/run.json").read_bytes()
    said = printed(command, "--resume", *more)
    assert "nothing to do: run" in said and "from now on" not in said
    assert len(begun) == 1 and Path("worker/run.json").read_bytes() == before
    assert main(["train", "--resume", "--steps", "31"]) == 0
    assert begun[-1].training.steps == 31


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [("training", "steps", "many"), ("training", "colour", "red"), ("launch", "worker_timeout", None)],
)
def test_a_plan_that_cannot_be_read_is_refused_by_the_name_of_its_field(
    begun: Launched, kind: str, name: str, value: Any, refused: Says
) -> None:
    path = Path("worker/run.json")
    state = json.loads(path.read_text())
    state["plan"][kind][name] = value
    path.write_text(json.dumps(state))
    said = refused("train", "--resume")
    assert "is not the record of a run" in said and name in said


def test_a_resume_that_was_not_accepted_leaves_no_option_behind(begun: Launched, tmp_path: Path) -> None:
    """Not even one that was killed while the server loaded."""
    RunDir(tmp_path / "worker").update_state(state=runs.FINISHED, step=30)
    for config in ("ddp.yaml", "fsdp.yaml"):
        refused = planned(Path("other.py"), resume=True, workers=7, accelerate_config=tmp_path / config, steps=50)
        prepare(tmp_path / "worker", refused)
    assert main(["train", "--resume", "-q"]) == 0, "it has nothing to do"
    assert len(begun) == 1
    assert main(["train", "--resume", "-q", "--steps", "40"]) == 0
    assert (begun[-1].launch.accelerate_config, begun[-1].training.steps) == (None, 40)
    assert begun[-1].config.name == "my trainer.py"


def test_a_path_means_the_same_in_another_folder(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ddp.yaml").write_text("num_processes: 2\n")
    assert main(["train", "my trainer.py", "-n", "1", "--accelerate-config", "ddp.yaml"]) == 0
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["train", "--resume", "--run-dir", "../worker"]) == 0
    assert launched[-1].launch.accelerate_config == tmp_path / "ddp.yaml"
    assert launched[-1].config == tmp_path / "my trainer.py"
