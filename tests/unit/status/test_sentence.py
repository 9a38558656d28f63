"""The state of a run in words, as `status` prints it."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.cli import main
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.summary import next_command
from kit.plans import planned


@pytest.mark.parametrize("state", [runs.FINISHED, runs.STOPPED, runs.FAILED])
def test_the_command_to_paste_is_one_line_of_its_own(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "a_folder_with_a_long_name_that_no_terminal_of_eighty_columns_has_room_for")
    prepare(run.root, planned(tmp_path / "my_trainer.py", workers=2))
    run.update_state(state=state, step=12)
    monkeypatch.setenv("COLUMNS", "80")
    main(["status", str(run.root)])
    assert f"  {next_command(state, run)}" in capsys.readouterr().out.splitlines()
