"""What the screen shows of `async-grpo evaluate`, which has problems and no steps."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from async_grpo.errors import WaitTimeoutError
from async_grpo.evals import asking
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.locks import server_lock
from async_grpo.status.render import panel
from async_grpo.status.snapshot import look
from async_grpo.telemetry.activity import EVALUATING, LOADING, Activity
from kit.plans import planned


def shown(root: Path) -> str:
    console = Console(file=StringIO(), width=80, highlight=False)
    console.print(panel(look(root)))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_an_evaluation_without_training_has_a_bar_of_problems(tmp_path: Path) -> None:
    run_id = prepare(tmp_path / "evaluation", planned(tmp_path / "x.py")).run_id
    root, lock, server = tmp_path / "evaluation", server_lock(tmp_path / "evaluation"), Activity()
    assert lock.try_acquire({"role": "evaluation"})
    server.publish(root, "server", device="cpu", run_id=run_id, state=LOADING)
    assert "is loading x.py" in shown(root), "its process is alive, and no parameter server was killed"
    server.doing(EVALUATING, version=0)
    server.evaluates(answered=30, problems=120, eta_s=9.0)
    text = shown(root)
    assert "evaluating in" in text
    assert "problem 30/120 " in text and "ETA 9 s" in text
    lock.release()


def test_the_pace_counts_what_was_answered_now(monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    told = list[dict[str, Any]]()
    now = [100.0]
    monkeypatch.setattr(asking, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(asking, "activity", SimpleNamespace(evaluates=lambda **fields: told.append(fields)))
    evaluation: Any = SimpleNamespace(done=40, total=100)  # 40 of an earlier process
    pace = asking._Pace(evaluation)
    pace.tell()
    now[0], evaluation.done = 110.0, 60
    pace.tell()
    assert [(it["answered"], it["problems"], it["eta_s"]) for it in told] == [(40, 100, None), (60, 100, 20.0)]
    assert messages == ["60 of 100 problems answered, ETA 20 s"], "a line now and then, for a screen without a terminal"
    now[0] += asking.PATIENCE_S + 1
    with pytest.raises(WaitTimeoutError, match="waiting for an answered problem"):
        pace.tell()
