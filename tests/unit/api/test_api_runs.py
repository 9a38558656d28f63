"""AsyncGRPO and its handle, with commands in place of a run: what is started, waited for, stopped, and told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import async_grpo.api.notebook as notebook_module
import async_grpo.api.run_handle as handle_module
import async_grpo.api.trainer as trainer_module
from async_grpo.api import AsyncGRPO, Handle
from async_grpo.api.notebook import POINTS, Panel, in_notebook, plot
from async_grpo.api.run_handle import CommandChild
from async_grpo.errors import RunDirError, RunFailedError, SetupFileError, UsageError, WaitTimeoutError
from async_grpo.rundir.lifecycle import prepare, server_lock
from async_grpo.rundir.paths import FINISHED, RunDir
from async_grpo.status.snapshot import look
from kit.plans import planned

Replace = Callable[[str], None]
SRC = Path(__file__).parents[3] / "src"
BEGINS = """
import sys, time
from pathlib import Path
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.run_plan import RunPlan
run_dir = Path(next(text for text in sys.argv if text.startswith("--run-dir=")).partition("=")[2])
state = prepare(run_dir, RunPlan(config=Path(sys.argv[2])))
"""


@pytest.mark.parametrize("run_dir", ["\0", b"worker", "\ud800", os.fsdecode(b"w\xff"), None, 3, "~no-such-user-here/x"])
def test_a_run_directory_that_cannot_be_is_refused(run_dir: Any, setup_file: Path) -> None:
    with pytest.raises(UsageError, match=r"run_dir=.* cannot be: "):
        AsyncGRPO(setup_file, run_dir=run_dir)
    with pytest.raises(UsageError):
        AsyncGRPO.attach(run_dir)


@pytest.mark.parametrize("get_trainer", ["a\0.py", "\ud800.py", b"my_trainer.py", None])
def test_a_setup_file_that_cannot_be_is_refused(get_trainer: Any) -> None:
    with pytest.raises(SetupFileError):
        AsyncGRPO(get_trainer)


@pytest.fixture
def instead_of_the_command(monkeypatch: pytest.MonkeyPatch) -> Replace:
    """Lets children run this program in place of `async-grpo`, with its arguments."""
    real = subprocess.Popen

    def replace(program: str) -> None:
        def started(command: list[str], **how: object) -> subprocess.Popen[str]:
            assert command[:3] == [sys.executable, "-Pm", "async_grpo.cli"]
            return real([sys.executable, "-c", program, *command[3:]], **how)  # type: ignore[call-overload]

        monkeypatch.setattr(handle_module.subprocess, "Popen", started)

    return replace


def test_a_run_is_started_with_its_options_and_read_at_its_end(
    setup_file: Path, tmp_path: Path, instead_of_the_command: Replace, capsys: pytest.CaptureFixture[str]
) -> None:
    instead_of_the_command(
        BEGINS
        + "RunDir = __import__('async_grpo.rundir.paths').rundir.paths.RunDir; print(sys.argv[1:])\n"
        + '(run_dir / \'metrics.jsonl\').write_text(\'{"step": 1, "loss": 0.5}\\n{"eval_version": 1, "step": 1}\\n\')\n'
        + "RunDir(run_dir).update_state(state='finished', step=1)"
    )
    run = AsyncGRPO(setup_file, workers=3, run_dir=tmp_path / "w", max_staleness=2, quiet=True)
    result = run.train()
    expected = ["train", str(setup_file), "--distributed", f"--run-dir={tmp_path / 'w'}"]
    assert str([*expected, "--max-staleness=2", "--quiet", "--num-workers=3"]) in capsys.readouterr().out
    assert list(result.metrics["loss"]) == [0.5], "the lines of evaluations are elsewhere"
    assert result.run_dir == tmp_path / "w" and result.summary == {} and len(result.evaluations) == 0
    with pytest.raises(UsageError, match="has started its run already"):
        run.train()


def test_a_child_that_dies_while_it_starts(setup_file: Path, tmp_path: Path, instead_of_the_command: Replace) -> None:
    instead_of_the_command("import os, sys; print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)")
    with pytest.raises(RunFailedError, match=r"was killed by signal 9(.|\n)*last words"):
        AsyncGRPO(setup_file, run_dir=tmp_path / "w").train()


def test_what_the_command_refuses_is_the_error(
    setup_file: Path, tmp_path: Path, instead_of_the_command: Replace
) -> None:
    instead_of_the_command("import sys; print('error: no such GPU', file=sys.stderr); sys.exit(2)")
    with pytest.raises(UsageError) as error:
        AsyncGRPO(setup_file, run_dir=tmp_path / "w").start()
    assert str(error.value) == "no such GPU"


def test_a_run_that_fails_after_it_began(setup_file: Path, tmp_path: Path, instead_of_the_command: Replace) -> None:
    instead_of_the_command(
        BEGINS
        + "while not (run_dir / 'go').exists(): time.sleep(0.01)\n"
        + "print('a reward failed', file=sys.stderr); sys.exit(1)"
    )
    handle = AsyncGRPO(setup_file, run_dir=tmp_path / "w").start()
    (tmp_path / "w" / "go").touch()
    with pytest.raises(RunFailedError, match=r"exit code 1(.|\n)*a reward failed"):
        handle.wait(step=1)


def test_an_interrupt_stops_the_run_before_it_is_raised(
    setup_file: Path, tmp_path: Path, instead_of_the_command: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = "import signal; signal.signal(signal.SIGTERM, lambda *_: (run_dir / 'stopped').touch() or sys.exit(0))\n"
    instead_of_the_command(ends + BEGINS + "time.sleep(300)")
    monkeypatch.setattr(Handle, "result", lambda self: os.kill(os.getpid(), signal.SIGINT) or time.sleep(60))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            AsyncGRPO(setup_file, run_dir=tmp_path / "w").train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "w" / "stopped").exists()


def test_a_wait_ends_with_its_time_or_with_the_run(tmp_path: Path, setup_file: Path) -> None:
    prepare(tmp_path / "w", planned(setup_file))
    goes_on = CommandChild(["status", str(tmp_path / "w"), "--watch"])
    handle = Handle(tmp_path / "w", goes_on)
    with handle, pytest.raises(WaitTimeoutError, match=r"Waited 0 s for step 5 of the run in .*w\. "):
        handle.wait(step=5, timeout_s=0)
    assert goes_on.is_over(), "the block has stopped it"
    with pytest.raises(RunDirError, match="ended at step 0, before step 5"):
        handle.wait(step=5)


@pytest.mark.parametrize(("options", "grace_s"), [({"stop_grace": 240.0}, 240.0), ({}, 9.0)])
def test_a_stop_gives_the_server_the_grace_that_the_run_was_begun_with(
    options: dict[str, object], grace_s: float, tmp_path: Path, setup_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through a handle that was found again, or of a resume, which name none."""
    prepare(tmp_path / "w", planned(setup_file, **options))
    waited: list[float] = []
    monkeypatch.setattr(handle_module, "within", lambda timeout_s, is_over: waited.append(timeout_s) or True)
    nobody: Any = SimpleNamespace(is_over=lambda: False, ask_to_stop=lambda: None)
    Handle(tmp_path / "w", nobody).stop()
    assert waited == [grace_s + handle_module.MARGIN_S]


def test_within_a_running_event_loop(setup_file: Path, tmp_path: Path, instead_of_the_command: Replace) -> None:
    instead_of_the_command(BEGINS)

    async def cell() -> None:
        AsyncGRPO(setup_file, run_dir=tmp_path / "w").train()

    asyncio.run(cell())
    assert RunDir(tmp_path / "w").read_state() is not None


def test_a_live_run_and_an_unfinished_one_are_left_alone(setup_file: Path, tmp_path: Path) -> None:
    root = tmp_path / "w"
    state = prepare(root, planned(setup_file))
    RunDir(root).update_state(step=3)
    with server_lock(root) as lock:
        assert lock.try_acquire({"role": "parameter server", "pid": os.getpid()})
        with pytest.raises(RunDirError, match="in use by a live parameter server"):
            AsyncGRPO(setup_file, run_dir=root).start()
    with pytest.raises(RunDirError, match="holds an unfinished run"):
        AsyncGRPO(setup_file, run_dir=root).start()
    assert RunDir(root).state_of(state.run_id).step == 3


def test_attaching(setup_file: Path, tmp_path: Path) -> None:
    with pytest.raises(RunDirError):
        AsyncGRPO.attach(tmp_path / "nothing")
    prepare(tmp_path / "w", planned(setup_file))
    RunDir(tmp_path / "w").update_state(state=FINISHED, step=7)
    handle = AsyncGRPO.attach(tmp_path / "w")
    assert handle.wait(step=7).state == FINISHED
    assert handle.stop().run_dir == handle.result().run_dir == tmp_path / "w"
    RunDir(tmp_path / "w").update_state(state="failed")
    with pytest.raises(RunFailedError):
        handle.result()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"workers": 2, "num_workers": 2}, "the same option"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, int], why: str, setup_file: Path) -> None:
    with pytest.raises(UsageError, match=why):
        AsyncGRPO(setup_file, **arguments)  # type: ignore[arg-type]


# --- The panel of a notebook: ------------------------------------------------------------------------------------


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
