"""The panel of a notebook: what it shows, where, and that a run's own output makes room for it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import async_grpo.api.notebook as notebook_module
import async_grpo.api.trainer as trainer_module
from async_grpo.api import AsyncGRPO, Handle
from async_grpo.api.notebook import POINTS, Panel, in_notebook, plot
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import FINISHED, RunDir
from async_grpo.status.snapshot import look
from kit.plans import planned


class Display:
    """IPython, as far as the panel uses it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown: list[list[str]] = []  # by output, its contents one after another
        self.shell = SimpleNamespace(kernel=None, execution_count=1)
        ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
        vars(ipython).update(get_ipython=lambda: self.shell)
        vars(display).update(HTML=str, display=self.display)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, html: str, *, display_id: bool) -> Any:
        self.shown.append([html])
        return SimpleNamespace(update=self.shown[-1].append)


class Ended:
    """A process that has ended well, with something to say."""

    def is_over(self) -> bool:
        return True

    def error(self) -> None: ...

    def news(self) -> list[str]:
        return ["worker 1 ended <again>"]

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    prepare(tmp_path / "my run", planned(tmp_path / "my_trainer.py"))
    return tmp_path / "my run"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Display:
    return Display(monkeypatch)


def test_a_run_has_one_panel_in_each_cell(run_dir: Path, notebook: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_module, "EVERY_S", 1e6)
    metrics = RunDir(run_dir).metrics
    metrics.write_text("".join(json.dumps({"step": step, "reward": step / 4}) + "\n" for step in (1, 2)))
    panel, view = Panel(run_dir), look(run_dir, details=False)
    panel.refresh(view, ["worker 1 ended <again>"])
    panel.refresh(view)
    assert len(notebook.shown) == len(notebook.shown[0]) == 1, "at most once in EVERY_S"
    assert "in my run" in notebook.shown[0][0] and "reward, 0.25 to 0.5" in notebook.shown[0][0]
    assert "worker 1 ended &lt;again&gt;" in notebook.shown[0][0]
    with metrics.open("a") as lines:
        lines.write('{"step": 3, "reward": 1.0}\n{"step": 3, "eval_version": 1}\n{"step": 4, "rew')
    panel.refresh(view, at_once=True)
    assert len(notebook.shown[0]) == 2 and "step 3</text>" in notebook.shown[0][1]
    notebook.shell.execution_count = 2
    panel.refresh(view, at_once=True)
    assert len(notebook.shown) == 2


def test_the_end_of_a_wait_is_shown(run_dir: Path, notebook: Display) -> None:
    RunDir(run_dir).update_state(state=FINISHED, step=3)
    handle = Handle(run_dir, Ended(), panel=Panel(run_dir))
    handle.wait()
    assert "finished" in notebook.shown[0][-1] and "worker 1 ended" not in notebook.shown[0][-1]
    assert "finished" in handle._repr_html_()


@pytest.mark.parametrize(("options", "has_panel"), [({}, True), ({"quiet": False}, False), ({"quiet": True}, False)])
def test_in_a_notebook_the_panel_takes_the_place_of_the_output(
    options: Any, has_panel: bool, tmp_path: Path, notebook: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def get_trainer(): ...")
    started: dict[str, Any] = {}
    child = lambda command, payload, **how: started.update(how, command=command)  # noqa: E731
    monkeypatch.setattr(trainer_module, "CommandChild", child)
    monkeypatch.setattr(AsyncGRPO, "_await_beginning", lambda *_: None)
    handle = AsyncGRPO(tmp_path / "mine.py", run_dir=tmp_path / "w", **options).start()
    assert started["only_errors"] is has_panel and (handle._panel is not None) is has_panel
    assert ("--quiet" in started["command"]) is (has_panel or bool(options["quiet"]))


def test_elsewhere_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not in_notebook()
    terminal = ModuleType("IPython")
    vars(terminal).update(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert not in_notebook()


def test_a_long_run_is_drawn_with_few_points() -> None:
    drawn = plot({step: float(step % 7) for step in range(1, 10 * POINTS + 1)})
    assert drawn.count(",") < 2 * POINTS and f"step {10 * POINTS}" in drawn
    assert plot({1: 1.0}) == "" and "reward, 1 to 1" in plot({1: 1.0, 2: 1.0})
