"""What the launcher shows, on a terminal and without one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from stage import FOLLOW_THE_RUN, LAUNCH, REAL_PYTHON, Stage, launch_env

from async_grpo.launch import screen as screen_module
from async_grpo.launch.child_log import LogLine, LogTail
from async_grpo.launch.screen import LineFilter, PanelScreen, Screen, fitting
from async_grpo.log import logger
from async_grpo.rundir import paths as runs
from async_grpo.rundir.lifecycle import prepare
from async_grpo.setup.library_warnings import SAID_BY
from async_grpo.setup.process import LOG_FORMAT
from async_grpo.status import snapshot
from async_grpo.telemetry.run_log import STEP
from kit.plans import planned

DEADLINE_S = 240.0
HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"
_SEQUENCE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> str:
    """Without the sequences that move the cursor or colour."""
    return _SEQUENCE.sub("", text)


class PseudoTerminal:
    """Runs `command` as a user would at a terminal of `columns` columns."""

    def __init__(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], columns: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.settings_before = termios.tcgetattr(theirs)
        names = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env={**names, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        self._theirs = theirs  # kept open, so that nothing is lost when the command ends
        self.written = b""

    @property
    def text(self) -> str:
        """Everything that was written, as one would read it."""
        return plain(self.written.decode(errors="replace"))

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def read_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.text[-4000:]}"
            self._read(0.1)

    def wait(self) -> int:
        """The exit code, once everything that it wrote is here."""
        self.read_until(lambda: self.process.poll() is not None, "end")
        while self._read(0):
            pass
        return self.process.returncode

    def is_clean(self) -> bool:
        """The cursor is visible, and the terminal's settings are what they were."""
        visible = self.written.rfind(SHOW_CURSOR) >= self.written.rfind(HIDE_CURSOR)
        return visible and termios.tcgetattr(self._theirs) == self.settings_before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._ours)
        os.close(self._theirs)

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], timeout_s)
        if ready:
            self.written += os.read(self._ours, 1 << 16)
        return bool(ready)


def step(second: int, number: int) -> LogLine:
    return LogLine("server", f"12:00:0{second}", "STEP", f"step {number}/100 ETA 9 s  reward 0.5")


def shown(lines: LineFilter, *said: LogLine, now: float) -> list[LogLine]:
    return list(lines.choose(said, now))


def test_fast_steps_are_thinned_and_the_last_is_always_shown() -> None:
    lines = LineFilter()
    assert shown(lines, step(0, 1), step(0, 2), now=100.0) == [step(0, 2)]
    assert shown(lines, step(1, 3), now=101.0) == []
    assert shown(lines, step(2, 4), now=102.1) == [step(2, 4)]
    assert shown(lines, step(3, 5), now=103.0) == []
    assert shown(lines, now=105.0) == [step(3, 5)], "steps pause: no news is withheld"
    assert shown(lines, step(6, 99), step(6, 100), now=106.0) == []
    evaluation = LogLine("server", "12:00:07", "INFO", "evaluation at step 100: reward 0.9")
    assert shown(lines, evaluation, now=106.5) == [step(6, 100), evaluation]
    assert list(lines.rest(107.0)) == []


WARNING, INFO = LogLine("worker 1", "1:0", "WARNING", "w"), LogLine("server", "1:0", "INFO", "i")
DETAIL = LogLine("worker 1", "1:0", "INFO", "d")
WAITS = LogLine("server", "1:0", "WAIT", "waiting for 2 groups (10 s so far)")


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, [WARNING, INFO, WAITS]),
        ({"with_panel": True}, [WARNING, INFO]),
        ({"verbose": True}, [WARNING, INFO, DETAIL, WAITS]),
        ({"quiet": True}, [WARNING]),
    ],
)
def test_warnings_always_and_the_rest_where_it_matters(options: dict[str, bool], chosen: list[LogLine]) -> None:
    assert shown(LineFilter(**options), WARNING, INFO, DETAIL, WAITS, now=0.0) == chosen


def test_what_a_library_warns_of_is_shown_once_though_each_process_says_it() -> None:
    said = [LogLine(name, "1:0", "WARNING", f"{SAID_BY} trl.trainer: a") for name in ("server", "worker 1")]
    other = LogLine("worker 1", "1:1", "WARNING", f"{SAID_BY} peft.tuners: b")
    lines = LineFilter(quiet=True)
    assert shown(lines, *said, WARNING, WARNING, now=0.0) == [said[0], WARNING, WARNING]
    assert shown(lines, said[0], other, now=1.0) == [other], "a worker was started again"


def test_without_a_terminal_a_run_that_loads_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(screen_module, "LOADING_EVERY_S", 0.0)
    prepare(tmp_path / "worker", planned(tmp_path / "x.py"))
    with Screen(tmp_path / "worker") as screen:
        screen.refresh()
        assert re.search(r"\[launcher\] the run is loading, .* s so far: processes start\n", capsys.readouterr().out)
        runs.RunDir(tmp_path / "worker").update_state(state=runs.FINISHED)
        screen.refresh()
        screen.refresh()
    with Screen(tmp_path / "worker", quiet=True) as quiet:
        quiet.refresh()
        quiet.say("nothing")
        quiet.warn("something")
    assert capsys.readouterr().out == "[launcher] something\n"


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_stays_under_lines_that_scroll(tmp_path: Path, width: int) -> None:
    prepare(tmp_path / "worker", planned(tmp_path / "x.py"))
    console = Console(file=StringIO(), width=width, force_terminal=True, highlight=False)
    log = tmp_path / "log.txt"
    with PanelScreen(tmp_path / "worker", [LogTail(log, "server")], console=console) as screen:
        screen.refresh()
        log.write_text(f"12:00:00 STEP    step 1/100{'  more' * 40}\n")
        screen.refresh()
        screen.warn("a long [markup] sentence " * 10)
    text = plain(console.file.getvalue())  # type: ignore[attr-defined]
    assert "╭─ run " in text and "starting" in text
    assert 8 < text.count("  more") < 40, "a step line has the parts that fit: the panel has the rest"
    assert text.count("a long [markup] sentence") == 10, "a warning is not"


def test_the_panel_asks_for_no_worker_while_the_run_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = "no worker is alive: start one"
    prepare(tmp_path / "worker", planned(tmp_path / "x.py"))
    view = replace(snapshot.look(tmp_path / "worker", details=False), bottleneck=lost)
    monkeypatch.setattr(snapshot, "look", lambda *_, **__: view)
    monkeypatch.setattr(screen_module, "PANEL_EVERY_S", 0.0)
    console = Console(file=StringIO(), width=120, force_terminal=True, highlight=False)
    with PanelScreen(tmp_path / "worker", console=console) as screen:
        screen.refresh()
        before = plain(console.file.getvalue())  # type: ignore[attr-defined]
        screen.stops("a checkpoint is written, then everything ends")
        screen.refresh()
    after = plain(console.file.getvalue())[len(before) :]  # type: ignore[attr-defined]
    last_panel = after[after.rindex("╭─ run ") :]
    assert lost in before and "stopping: a checkpoint is written" in last_panel and lost not in last_panel


@pytest.mark.parametrize(("width", "shown"), [(80, "1  2  3"), (7, "1  2  3"), (6, "1  2"), (1, "1"), (0, "1")])
def test_a_step_line_loses_its_last_parts_where_the_terminal_is_narrow(width: int, shown: str) -> None:
    assert fitting("1  2  3", width) == shown


def test_a_run_that_cannot_be_shown_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, highlight=False)
    with PanelScreen(tmp_path, console=console) as screen:
        screen.refresh()
        monkeypatch.setattr("async_grpo.status.snapshot.look", Mock(side_effect=ZeroDivisionError("a bug")))
        monkeypatch.setattr(screen, "_next_look", 0.0)
        screen.refresh()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "no run.json" in text and "ZeroDivisionError: a bug); it continues" in text


# --- a terminal


def terminal(*command: str, cwd: Path) -> closing[PseudoTerminal]:
    return closing(PseudoTerminal([REAL_PYTHON, "-c", *command], cwd=cwd, env=launch_env()))


def test_ctrl_c_leaves_a_clean_terminal(stage: Stage) -> None:
    stage.children_are(
        server="""
            stop_when_asked()
            (RUN / "consumed.jsonl").touch()
            until(lambda: False)
        """,
        worker=FOLLOW_THE_RUN,
    )
    with terminal(LAUNCH, str(stage.folder), cwd=stage.folder) as screen:
        screen.read_until(lambda: "╭─ run " in screen.text and stage.run.consumption.exists(), "panel")
        assert not screen.is_clean()
        screen.press_ctrl_c()
        assert screen.wait() == 0
        assert HIDE_CURSOR in screen.written and screen.is_clean()
        assert "[launcher] stopping: a checkpoint is written, then everything ends" in screen.text
        assert screen.written.partition(b"^C")[2].startswith(b"\r\x1b[2K"), "the echo stays behind the panel, as a part"


def test_a_crash_leaves_a_clean_terminal(stage: Stage) -> None:
    stage.children_are(
        server='until(lambda: started("worker2")); print("error: no memory", file=sys.stderr); sys.exit(3)',
        worker=FOLLOW_THE_RUN,
    )
    with terminal(LAUNCH, str(stage.folder), cwd=stage.folder) as screen:
        screen.wait()
        assert HIDE_CURSOR in screen.written and screen.is_clean()
        assert screen.text.rstrip().endswith("error: no memory")


IN_BACKGROUND = """
import os, signal, sys
from pathlib import Path
from rich.console import Console
from async_grpo.launch.screen import PanelScreen
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    with PanelScreen(Path(sys.argv[1]), console=Console()) as screen:
        screen.say("it continues")
    os._exit(0)
_, status = os.waitpid(child, os.WUNTRACED)
if os.WIFSTOPPED(status):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sys.exit("the terminal stopped it")
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_in_the_background_of_a_terminal_a_run_goes_on(tmp_path: Path) -> None:
    """`async-grpo train … &`: who changes a terminal's settings from there is stopped by the kernel."""
    with terminal(IN_BACKGROUND, str(tmp_path), cwd=tmp_path) as screen:
        assert screen.wait() == 0, screen.text
        assert "[launcher] it continues" in screen.text and screen.is_clean()


# --- What the launcher shows of its children's logs --------------------------------------------------------------

LINE = "12:00:00 INFO    "


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log_worker_1.txt"


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_our_lines_are_shown_once_with_the_child_s_name_and_library_noise_is_not(log: Path) -> None:
    tail = LogTail(log, "worker 1")
    assert tail.new_lines() == []
    append(log, f"{LINE}hello\nDownloading shards: 100%\n  warnings.warn(\n12:00:01 WARNING slow\n")
    assert [str(line) for line in tail.new_lines()] == [f"[worker 1] {LINE}hello", "[worker 1] 12:00:01 WARNING slow"]
    assert tail.new_lines() == []


def test_what_an_earlier_run_wrote_is_not_shown(log: Path) -> None:
    append(log, f"{LINE}old\nerror: old\n")
    tail = LogTail(log, "w")
    append(log, f"{LINE}new\n")
    assert [str(line) for line in tail.new_lines()] == [f"[w] {LINE}new"]
    assert tail.last_words() == f"{LINE}new"


def test_last_words_begin_at_the_last_error_or_traceback(log: Path) -> None:
    tail = LogTail(log, "w")
    traceback = "Traceback (most recent call last):\n  File x\nValueError: no"
    append(log, f"error: first\n{LINE}again\n{traceback}\n")
    assert tail.last_words() == traceback
    append(log, "error: The directory is in use.\nWait for it.\n")
    assert tail.last_words() == "error: The directory is in use.\nWait for it."


def test_last_words_without_an_error_are_the_last_lines(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, "".join(f"line {number}\n" for number in range(100)))
    assert tail.last_words().splitlines() == [f"line {number}" for number in range(70, 100)]


def test_a_child_that_wrote_nothing(log: Path) -> None:
    assert LogTail(log, "w").last_words() == "(it wrote nothing)"


def test_what_a_model_wrote_does_not_steer_the_terminal(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, f"{LINE}bad answer \x1b]0;hi\x07\nerror: \x1b[2J gone\n")
    assert [str(line) for line in tail.new_lines()] == [f"[w] {LINE}bad answer \\x1b]0;hi\\x07"]
    assert tail.last_words() == "error: \\x1b[2J gone"


def test_what_the_log_writes_is_read_with_its_level(log: Path) -> None:
    tail = LogTail(log, "server")
    sink = logger.add(log, format=LOG_FORMAT, level="INFO")
    try:
        logger.log(STEP, "step 1/2")
        logger.warning("two\nlines")
    finally:
        logger.remove(sink)
    first, second = tail.new_lines()
    assert first == LogLine("server", first.time, "STEP", "step 1/2")
    assert (second.level, second.text) == ("WARNING", "two")


def test_the_last_words_of_a_log_that_was_deleted_meanwhile(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, f"{LINE}it begins\n")
    tail.new_lines()
    with log.open("a") as file:
        log.unlink()
        file.write("error: the directory is gone\n")
    assert tail.last_words() == "error: the directory is gone"
