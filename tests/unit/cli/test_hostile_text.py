"""Text of a model or of a hostile file never steers the terminal, and breaks no command that only reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.cli.compute.evaluate import _table
from async_grpo.log import logger
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.rundir.files import write_json
from async_grpo.rundir.paths import RunState
from async_grpo.setup.process import set_up_log
from kit.archived_run import RUN, ArchivedRun, three_steps
from kit.groups import make_job
from kit.plans import planned

CONTROLS = "\x1b]0;owned\x07\x1b[2J\u202e[/bold]"
COMMANDS = (
    *("status", "rollouts", "rollouts --job 7", "rollouts --job 99", "audit", "queue ls", "queue quarantine"),
    *("queue show 7", "queue show 99"),
)


@pytest.fixture
def hostile(tmp_path: Path) -> ArchivedRun:
    """A run with control characters wherever a file of it may have text."""
    made = three_steps(tmp_path, state="failed")
    reward = {"reward_names": (f"right{CONTROLS}", "format"), "rewards": ((1.0, 0.5), (0.0, 0.5))}
    made.group(6, 3, folder="queue", completions=[CONTROLS, f"b\n{CONTROLS}"], prompt=CONTROLS, **reward)
    server = ServerQueue.open(made.root, RUN, max_attempts=1, watch_workers=False)
    worker = WorkerQueue.open(made.root, 1, "cpu")
    server.submit(make_job(7, run_id=RUN, row={"prompt": CONTROLS}))
    (claim,) = worker.claim(1)
    worker.fail(claim, f"Traceback\nValueError: {CONTROLS}\nlast: {CONTROLS}")
    worker.close()
    server.close()
    (made.root / f"queue/{CONTROLS.replace('/', '')}").write_text("")
    made.run.write_state(
        RunState(
            run_id=RUN, state="failed", plan=planned(Path(f"{CONTROLS}.py")), started=CONTROLS, run_dir=f"/x{CONTROLS}"
        )
    )
    write_json(made.root / "alive" / "server.status", {"device": CONTROLS, "state": CONTROLS, "text": CONTROLS})
    return made


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_lets_text_steer_the_terminal(
    hostile: ArchivedRun, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    main([name, str(hostile.root), *options])
    printed = "".join(capsys.readouterr())
    assert not set("\x1b\x07\u202e") & set(printed), printed
    assert printed


def test_neither_does_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    _table(f"model{CONTROLS}", {}, {"0": f"ValueError: {CONTROLS}"})
    assert "\x1b" not in (printed := "".join(capsys.readouterr())), printed
    assert "ValueError" in printed


def test_neither_does_the_log_of_a_process_that_was_started_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log("INFO")
    logger.warning("prompt group 7 failed: {}", CONTROLS)
    try:
        raise ValueError(CONTROLS)
    except ValueError as error:
        logger.opt(exception=error).warning("an agent's call ended")
    printed = "".join(capsys.readouterr())
    assert "ValueError: " in printed and "prompt group 7 failed" in printed
    assert not set("\x1b\x07\u202e") & set(printed), printed


def test_a_text_that_is_quoted_in_a_log_cannot_look_like_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_log("INFO")
    logger.warning("refused: {}", "a\n12:00:00 INFO    all is well")
    first, second = "".join(capsys.readouterr()).splitlines()
    assert first.endswith("refused: a") and second == "  12:00:00 INFO    all is well"


@pytest.mark.parametrize(
    "summary", [{"rollouts": "many"}, {"rollouts": 1, "steps": None}, {"steps": 3, "rollouts": 9, "wall_seconds": "x"}]
)
def test_a_summary_with_other_values_is_told_or_left_out(
    tmp_path: Path, summary: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    made = three_steps(tmp_path, state="finished")
    (made.root / "summary.json").write_text(json.dumps(summary))
    main(["status", str(made.root)])
    assert "finished" in capsys.readouterr().out
