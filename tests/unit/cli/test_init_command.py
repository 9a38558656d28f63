"""`async-grpo init` writes a setup file that is usable as it is, and never over one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.cli import main
from async_grpo.setup.setup_file import check_setup_file, load_trainer
from kit.commands import Says


def test_the_file_makes_a_trainer_and_marks_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, printed: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "async-grpo train my_trainer.py --distributed" in printed("init")
    written = tmp_path / "my_trainer.py"
    check_setup_file(written)
    trainer = load_trainer(written, steps=1)
    trainer.train()
    assert trainer.state.global_step == 1
    text = written.read_text()
    assert all(f"{line}  # CHANGE" in text for line in ("model=tiny_model(tokenizer),", "max_completion_length=6,"))
    assert text.count("CHANGE") > 8


def test_the_commands_in_it_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "a sum.py"]) == 0
    assert "async-grpo train 'a sum.py' --distributed" in (tmp_path / "a sum.py").read_text()


@pytest.mark.parametrize("there", ["file", "dangling link", "folder"])
def test_nothing_is_overwritten(there: str, tmp_path: Path, refused: Says) -> None:
    path = tmp_path / "mine.py"
    if there == "file":
        path.write_text("mine")
    elif there == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "nowhere.py")
    assert "is there already, and stays as it is" in refused("init", path)
    assert there != "file" or path.read_text() == "mine"
    assert not (tmp_path / "nowhere.py").exists()


@pytest.mark.parametrize(("name", "why"), [("trainer.txt", "does not end in .py"), ("no/where.py", "No such file")])
def test_a_file_that_cannot_be_is_refused(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.chdir(tmp_path)
    assert why in refused("init", name)
    assert not [*tmp_path.iterdir()]
