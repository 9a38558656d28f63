"""Ctrl-C in a replay says what became of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.roles import replay
from async_grpo.settings import TrainingSettings
from async_grpo.training import reporting, trl_trainer
from async_grpo.training.corrections import checks, trl_loss
from async_grpo.training.corrections.rule import rule


@pytest.mark.parametrize(("done", "says"), [(3, "after 3 of 9 steps and saved no weights"), (9, "may not be complete")])
def test_the_steps_that_were_done_are_told(
    done: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def nothing(*args: Any, **kwargs: Any) -> None: ...

    for module, name in ((checks, "check"), (trl_trainer, "make_async"), (reporting, "report")):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(trl_loss, "has_own_loss", lambda trainer: False)
    monkeypatch.setattr(trl_trainer, "fit", interrupted if done < 9 else nothing)
    state = SimpleNamespace(global_step=done, max_steps=9)
    trainer = SimpleNamespace(state=state, save_model=interrupted)
    with pytest.raises(replay.ReplayStoppedError, match=says):
        replay._train(trainer, iter([]), rule("bypass", None, None, None), TrainingSettings(), tmp_path)


def test_before_the_first_step_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(options: replay.ReplayOptions) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(replay, "run_replay", interrupted)
    assert main(["replay", str(tmp_path), "--device", "cpu"]) == 130
    assert "before its first step: nothing was written" in capsys.readouterr().err
