"""What `async-grpo evaluate` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from archived_run import three_steps

from async_grpo.cli import main


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_an_evaluation_never_continues_or_replaces_a_training_run(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = three_steps(tmp_path)
    setup = tmp_path / "setup.py"
    setup.write_text("def get_trainer():\n    raise AssertionError\n")
    before = sorted(path.relative_to(run.root) for path in run.root.rglob("*"))
    asked = ["evaluate", "some/model", "--config", setup, "--run-dir", run.root, how]
    assert main(list(map(str, asked))) == 2
    assert "holds a training run" in capsys.readouterr().err
    assert sorted(path.relative_to(run.root) for path in run.root.rglob("*")) == before
