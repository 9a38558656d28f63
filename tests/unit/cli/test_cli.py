"""The command line: instant help, input that is refused, and which setting wins."""

from __future__ import annotations

import argparse
import errno
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from async_grpo import cli, settings
from async_grpo.cli import COMMANDS, main
from async_grpo.cli.compute import train as train_command
from async_grpo.cli.inspect import queue
from async_grpo.errors import UsageError
from async_grpo.rundir.lifecycle import prepare
from async_grpo.setup import process
from kit.archived_run import ArchivedRun, three_steps
from kit.commands import Says
from kit.plans import planned

SRC = Path(__file__).parents[3] / "src"
HEAVY = {"torch", "numpy", "transformers", "trl", "datasets", "rich", "cupy", "vllm"}
LIGHT = f"""
import contextlib, io, sys
from async_grpo.cli import COMMANDS, main
with contextlib.redirect_stdout(io.StringIO()):
    for arguments in ["--help"], [], *([name, "--help"] for name in COMMANDS):
        with contextlib.suppress(SystemExit):
            main(arguments)
    assert not {HEAVY} & sys.modules.keys(), sorted({HEAVY} & sys.modules.keys())
    assert "async_grpo.api" not in sys.modules
    from async_grpo import AsyncGRPO
    for name in "audit", "status", "rollouts":
        assert main([name, sys.argv[1]]) == 0
import async_grpo.checks.doctor.checkup, async_grpo.checks.bug_report.dump, async_grpo.reports.board
import async_grpo_experiments.runner.experiment, async_grpo_ipc.__main__, async_grpo_ipc.report
print("imported:", sorted({HEAVY - {"numpy", "rich"}} & sys.modules.keys()))
"""


def run_python(
    *arguments: str, cwd: Path, path: str | None = str(SRC), stdout: Any = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LOG_LEVEL")}
    if path is not None:
        env["PYTHONPATH"] = path
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=env, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)


def run_command(*arguments: str, cwd: Path, stdout: Any) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "async_grpo.cli", *arguments, cwd=cwd, stdout=stdout)


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """A pipe to a reader that has read enough."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


# --- help


@pytest.mark.parametrize("arguments", [["--help"], [], *([name, "--help"] for name in COMMANDS)])
def test_help_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main(arguments)
    said = capsys.readouterr().out
    assert "usage: async-grpo" in said
    assert ("examples:" in said) == (len(arguments) == 2)
    assert "--launched-by" not in said, "that is between our own processes"


def test_help_and_what_only_reads_import_nothing_heavy(tmp_path: Path) -> None:
    result = run_python("-c", LIGHT, str(three_steps(tmp_path, state="finished").root), cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("imported: []\n")


@pytest.mark.parametrize(
    ("script", "command"),
    [("train.py", "train"), ("parameter_server.py", "server"), ("worker.py", "worker"), ("show_board.py", "board")],
)
def test_the_scripts_are_the_commands_from_wherever_they_are_called(script: str, command: str, tmp_path: Path) -> None:
    script_alone = ("-S", str(SRC / "cli" / script))  # -S: as if nothing were installed
    result = run_python(*script_alone, "--help", cwd=tmp_path, path=None)
    assert result.returncode == 0, result.stderr
    assert f"usage: async-grpo {command}" in result.stdout


@pytest.mark.parametrize("arguments", [["status", "worker", "--json"], ["rollouts", "worker"], ["train", "--help"]])
def test_a_reader_that_has_read_enough_is_no_error(arguments: list[str], tmp_path: Path, closed_pipe: int) -> None:
    ArchivedRun(tmp_path).use(1, [0])
    result = run_command(*arguments, cwd=tmp_path, stdout=closed_pipe)
    assert (result.returncode, result.stderr) == (0, "")


def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one to a process of a reward function; the command's own output is read."""
    monkeypatch.setattr(cli, "_run", Mock(side_effect=BrokenPipeError))
    with pytest.raises(BrokenPipeError):
        main(["train", "my_trainer.py"])


def test_a_training_that_ends_because_its_output_is_closed_is_not_done(tmp_path: Path, closed_pipe: int) -> None:
    (tmp_path / "my_trainer.py").write_text("def get_trainer(): print('loading', flush=True)")
    result = run_command("train", "my_trainer.py", "--device", "cpu", cwd=tmp_path, stdout=closed_pipe)
    assert result.returncode == 141


@pytest.mark.parametrize("arguments", [["audit", "worker"], ["train", "--help"], ["--help"], ["--version"]])
def test_an_output_on_a_full_disk_is_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    prepare(tmp_path / "worker", planned(tmp_path / "my_trainer.py"))
    with Path("/dev/full").open("w") as full:
        result = run_command(*arguments, cwd=tmp_path, stdout=full)
    assert result.returncode == 1
    assert result.stderr.startswith("error: The output of this command, or a file") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (OSError(errno.EROFS, "", f"/a/.x.html.{'0' * 32}"), 2, "/a/x.html: its file system is read-only. Choose"),
        (PermissionError(errno.EACCES, "", "/a/x"), 2, "/a/x: this user has no right to do that. Choose"),
        (NotADirectoryError(errno.ENOTDIR, "", "/a/x"), 2, "/a/x: a part of this path is a file, not a folder."),
        (OSError(errno.ENAMETOOLONG, "", "y" * 300), 2, f"{'y' * 120}…: the name is too long for this file system."),
        (OSError(errno.EFBIG, "", "/a/x"), 2, "/a/x: the file has come to the largest size that is allowed. Raise"),
        (OSError(errno.ENOSPC, "", "/a/x"), 1, "/a/x: the disk is full. Make room, or choose another place."),
    ],
)
def test_what_the_system_refuses_is_one_sentence(
    error: OSError, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(queue, "run", Mock(side_effect=error))
    monkeypatch.setattr(cli, "_write_no_more", lambda: None)
    assert main(["queue", ".", "ls"]) == code
    assert capsys.readouterr().err.startswith(f"error: {sentence}")


def test_an_error_of_the_users_code_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_trainer.py").write_text("def read(*_): open(__file__ + '/x')")
    monkeypatch.setattr(queue, "run", runpy.run_path(str(tmp_path / "my_trainer.py"))["read"])
    with pytest.raises(NotADirectoryError):
        main(["queue", ".", "ls"])


@pytest.mark.parametrize("command", ["status x", "rollouts x", "compare a b", "train t.py -n 2 --dry-run"])
def test_a_working_directory_that_was_deleted_is_said(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert refused(*command.split()).count("The folder that this command was started in has been deleted.") == 1


@pytest.mark.parametrize("command", ["status", "audit", "rollouts", "replay"])
def test_a_run_is_named_as_for_train_too(command: str, refused: Says) -> None:
    for arguments in (["/nowhere"], ["--run-dir", "/nowhere"], ["--run-dir=/nowhere"]):
        assert refused(command, *arguments).startswith("error: /nowhere does not exist")
    assert "not allowed with argument" in refused(command, "here", "--run-dir", "there")


def test_a_closed_output_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path / "worker", planned(tmp_path / "my_trainer.py"))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)  # what Python makes of `>&-`
    assert main(["status", str(tmp_path / "worker"), "--json"]) == 0
    assert main(["status", str(tmp_path / "nowhere")]) == 2


def test_what_another_version_wrote_names_a_way_on(tmp_path: Path, refused: Says) -> None:
    prepare(tmp_path / "worker", planned(tmp_path / "my_trainer.py"))
    record = tmp_path / "worker" / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "format": 99}))
    assert "Use that version for it, or choose another run directory." in refused("status", tmp_path / "worker")


# --- input that cannot be used


def test_what_the_user_can_act_on_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    setup = tmp_path / "my_trainer.py"
    setup.write_text("x = 1")
    result = run_python(str(SRC / "cli" / "train.py"), setup.name, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("error: my_trainer.py defines no get_trainer().")


def test_an_engine_that_is_not_installed_is_refused_before_anything_is_started(
    setup_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command in (["train", setup_file, "-n", "1"], ["worker", "-d", "cpu"]):
        said = refused(*command, "--run-dir", tmp_path / "run", "--generator", "vllm")
        assert "error: --generator vllm: vLLM is not installed here" in said
    assert not (tmp_path / "run").exists()


SEEDS = "must be a whole number from 0 to 2^32 - 1"
SENSELESS = (
    "--steps=0 --steps=-1 --steps=1.5 --steps=many --steps= --num-workers=-1 --max-staleness=-1 --max-attempts=0 "
    "--stop-grace=0 --stop-grace=inf --stop-grace=long --log-level=loud --seed=x --no-such-option"
)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        *((f"train x.py --distributed {option}", option.partition("=")[0]) for option in SENSELESS.split()),
        ("train x.py --distributed --resume --overwrite", "--resume"),
        ("train x.py --seed -1", SEEDS),
        ("evaluate x --seed=-1", SEEDS),
        ("train x.py --step 3", "unrecognized arguments: --step 3. Did you mean --steps?"),
        ("delta verify x --jso y", "unrecognized arguments: --jso y"),
        ("sweep x.py --dry-run", "unrecognized arguments: --dry-run\nasync-grpo sweep --help explains"),
        ("train --max-stalness 2", "Did you mean --max-staleness?"),
        ("status --wach", "Did you mean --watch?"),
        ("trian", "Did you mean train?"),
    ],
)
def test_options_that_there_are_not_and_values_that_make_no_sense(command: str, says: str, refused: Says) -> None:
    said = refused(*command.split())
    assert says in said
    assert len(said.splitlines()) <= 6, "a long usage hides what is wrong"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "the default, src/app/trainer_setup_gsmk.py, is not in this folder"),
        (["train"], "async-grpo train my_trainer.py"),
        (["train", "missing.py"], "Setup file not found: missing.py"),
        (["train", "SETUP", "--resume"], "Nothing to resume"),
        (["train", "--resume"], "Nothing to resume"),
        (["train", "SETUP", "--overwrite"], "add --distributed"),
        (["train", "SETUP", "-n", "2", "-d", "0"], "--device is for one process"),
        (["train", "SETUP", "-d", "0"], "no CUDA GPU is visible here"),
        (["train", "SETUP", "-n", "2", "--master-device-id", "1"], "no CUDA GPU is visible here"),
        (["server", "--config", "missing.py"], "Setup file not found: missing.py"),
        (["server", "--config", "SETUP", "-d", "5"], "no CUDA GPU is visible here"),
        (["worker", "-d", "gpu"], "must be a GPU index or 'cpu'"),
        (["worker", "--config", "missing.py"], "Setup file not found: missing.py"),
        (["board", "missing"], "missing does not exist, so no run has begun there"),
        (["board", "."], "is not a run directory: it has no run.json"),
    ],
)
def test_refusals(
    arguments: list[str], message: str, setup_file: Path, monkeypatch: pytest.MonkeyPatch, see_gpus: Any, refused: Says
) -> None:
    see_gpus(0)
    monkeypatch.chdir(setup_file.parent)
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.setattr(process, "set_up_log", lambda level, rank=0: None)
    error = refused(*(setup_file.name if part == "SETUP" else part for part in arguments))
    assert error.startswith("error: ") and message in error
    assert [path.name for path in setup_file.parent.iterdir()] == [setup_file.name], "nothing was begun"


@pytest.mark.parametrize(
    ("arguments", "how"),
    [
        ([], "GPU 0, without workers: add -n 2"),
        (["-d", "cpu"], "the CPU, without workers: take -n 2 in place of --dev"),
    ],
)
def test_the_first_line_of_one_process_names_the_way_to_workers(
    arguments: list[str], how: str, setup_file: Path, monkeypatch: pytest.MonkeyPatch, see_gpus: Any, printed: Says
) -> None:
    see_gpus(1)
    monkeypatch.setattr(train_command.os, "environ", dict(os.environ))
    monkeypatch.setattr(train_command, "hold_to_device", lambda *_: None)
    monkeypatch.setattr(train_command, "check_torch_sees", lambda *_: None)
    monkeypatch.setattr(process, "set_up_log", lambda *_: None)
    monkeypatch.setattr(process, "keep_freed_memory", lambda *_: None)
    monkeypatch.setattr(train_command, "_train_alone", lambda *_, **__: print("TRL trains"))
    first, second = printed("train", setup_file, *arguments).splitlines()
    assert first.startswith(f"one process of plain TRL on {how}") and second == "TRL trains"


# --- how options are spelled


def test_underscores_are_dashes(setup_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[argparse.Namespace] = []
    monkeypatch.setattr(train_command, "_distributed", lambda args: chosen.append(args) or 0)
    options_given = ["--max_staleness", "2", "--run_dir=a_b", "--keep_done", "7"]
    assert main(["train", str(setup_file), "--distributed", *options_given]) == 0
    assert (chosen[0].max_staleness, chosen[0].run_dir, chosen[0].keep_done.amount) == (2, Path("a_b"), 7)


# --- a flag beats the environment, which beats the default


@pytest.mark.parametrize(
    ("flag", "environment", "level"),
    [
        (None, None, "INFO"),
        (None, "", "INFO"),
        (None, "debug", "DEBUG"),
        ("ERROR", "debug", "ERROR"),
        ("ERROR", "nonsense", "ERROR"),
    ],
)
def test_log_level(flag: str | None, environment: str | None, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    if environment is not None:
        monkeypatch.setenv("LOG_LEVEL", environment)
    assert settings.log_level(flag) == level


def test_a_log_level_of_the_environment_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(UsageError, match="LOG_LEVEL must be one of DEBUG, INFO, WARNING, ERROR, got 'LOUD'"):
        settings.log_level(None)


# --- Ctrl-C in the first moments of a command, which are imports -------------------------------------------------


def test_next_to_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    """Until `main` is called, a signal is a traceback from the middle of an import."""
    code = "import sys, os, io, errno; was = set(sys.modules); import async_grpo.cli; print(*sys.modules.keys() - was)"
    command = [sys.executable, "-S", "-c", code]  # without site, which imports what is installed beside us
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    loaded = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=60)
    ours = {"async_grpo", "async_grpo.cli", "async_grpo.errors", "async_grpo.version", "__future__"}
    assert set(loaded.stdout.split()) <= ours


def test_ctrl_c_while_plain_trl_loads_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (setup := tmp_path / "my_trainer.py").write_text("def get_trainer(): ...")
    monkeypatch.setattr("async_grpo.setup.devices._compute_modes", lambda visible: [])
    monkeypatch.setattr("async_grpo.setup.process.set_up_log", lambda level, rank=0: None)
    monkeypatch.setattr("async_grpo.setup.setup_file.load_trainer", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["train", str(setup), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "stopped, nothing was trained\n"


@pytest.mark.parametrize("module", ["async_grpo.cli.compute.train", "argparse"])
def test_ctrl_c_while_the_command_is_imported_is_no_traceback(module: str, tmp_path: Path) -> None:
    """The first moments of a command are imports: a signal that arrives in them raises there."""
    stop = (
        "import signal, sys, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background ignore it
        "class Stop(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "from async_grpo.cli import main\n"
        "sys.modules.pop('argparse', None)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.exit(main(['train', '--help']))"
    )
    ended = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
