"""Processes are started, watched, started again and ended. These are plain ones, which know nothing of a run."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from async_grpo.launch import supervisor as supervisor_module
from async_grpo.launch.supervisor import Child, Exits, Restart, Supervisor
from async_grpo.setup import process
from kit.waiting import is_gone, until

SLEEP = ("sleep", "1000")
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(1000)"
THOROUGH = """
import signal, sys, time
from pathlib import Path

def stop(*_):
    while not Path("go").exists():
        time.sleep(0.01)
    sys.exit(5)

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


class Bench:
    """Makes children that run in a folder, and keeps what the supervisor says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def child(self, name: str, *command: str, **more: Any) -> Child:
        fields = {"env": os.environ, "grace_s": 60.0, "log": self.folder / f"{name}.log", **more}
        return Child(name=name, command=command, **fields)

    def python(self, name: str, code: str, **more: Any) -> Child:
        return self.child(name, sys.executable, "-S", "-c", code, **more)

    def supervise(self, *children: Child, look: Callable[[], object] = lambda: None) -> Supervisor:
        return Supervisor(children, say=self.said.append, look=look)  # type: ignore[arg-type]

    def wrote(self, name: str) -> str:
        log = self.folder / f"{name}.log"
        return log.read_text() if log.exists() else ""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(supervisor_module, "POLL_S", 0.01)
    monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 0.005)
    monkeypatch.chdir(tmp_path)
    return Bench(tmp_path)


def ended(*names: str) -> Callable[[Exits], bool]:
    return lambda exits: exits.keys() >= set(names)


def test_children_run_until_all_have_ended_each_with_its_own_code_log_and_environment(bench: Bench) -> None:
    code = "import os; print(os.environ['NUMBER']); raise SystemExit(int(os.environ['NUMBER']))"
    children = [bench.python(name, code, env={"NUMBER": name}) for name in ("0", "3")]
    (bench.folder / "3.log").write_text("before\n")
    with bench.supervise(*children) as supervisor:
        exits = supervisor.run_until(ended("0", "3"))
    assert {name: (exit.code, exit.starts) for name, exit in exits.items()} == {"0": (0, 1), "3": (3, 1)}
    assert (bench.wrote("0"), bench.wrote("3")) == ("0\n", "before\n3\n")
    assert bench.said == []


def test_a_stop_while_children_are_started_starts_no_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million of them would be started for hours."""
    start = supervisor_module.start_logged

    def started(*command: Any) -> Any:
        supervisor.stop()
        return start(*command)

    monkeypatch.setattr(supervisor_module, "start_logged", started)
    with bench.supervise(*(bench.child(name, *SLEEP) for name in "abc")) as supervisor:
        supervisor.run_until(ended("a"))
    assert {name: exit.starts for name, exit in supervisor.exits.items()} == {"a": 1}


SAYS_THAT_IT_WAS_ASKED = """
import signal, sys, time
from pathlib import Path

def stop(*_):
    Path("asked").open("a").write(sys.argv[1])
    sys.exit()

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(1000)
"""


def test_those_named_end_before_the_others_are_asked(bench: Bench) -> None:
    children = [bench.child(name, sys.executable, "-c", SAYS_THAT_IT_WAS_ASKED, name) for name in "abc"]
    ready = lambda: all(bench.wrote(name) for name in "abc") and supervisor.stop()  # noqa: E731
    with bench.supervise(*children, look=ready) as supervisor:
        supervisor.run_until(ended("a", "b", "c"))
        supervisor.end(first=("b",))
    asked = (bench.folder / "asked").read_text()
    assert asked[0] == "b" and sorted(asked) == ["a", "b", "c"]


def test_each_child_has_a_grace_of_its_own_and_is_killed_after_it(bench: Bench) -> None:
    def look() -> None:
        if bench.wrote("deaf") and bench.wrote("thorough"):
            supervisor.stop()
        if supervisor.stopping and not supervisor._processes[0].running:
            (bench.folder / "go").touch()  # now the grace of the other is over

    children = bench.python("deaf", DEAF, grace_s=0.05), bench.python("thorough", THOROUGH)
    with bench.supervise(*children, look=look) as supervisor:
        supervisor.run_until(ended("deaf", "thorough"))
    assert [supervisor.exits[name].code for name in ("deaf", "thorough")] == [-signal.SIGKILL, 5]


def test_children_that_end_by_themselves_need_not_be_asked(bench: Bench) -> None:
    waits = "import time\nfrom pathlib import Path\nwhile not Path('done').exists(): time.sleep(0.01)"
    with bench.supervise(bench.python("a", waits), bench.python("b", "pass")) as supervisor:
        supervisor.run_until(ended("b"))
        (bench.folder / "done").touch()
        supervisor.end(ask=False)
    assert supervisor.exits["a"].code == 0


def test_an_error_while_looking_leaves_no_child(bench: Bench) -> None:
    errors = [ZeroDivisionError()]

    def look() -> None:
        if errors:
            raise errors.pop()

    supervisor = bench.supervise(bench.child("a", *SLEEP), look=look)
    with pytest.raises(ZeroDivisionError), supervisor:
        supervisor.run_until(ended("a"))
    assert is_gone(supervisor.exits["a"].pid)


def test_a_command_that_does_not_exist_leaves_no_child(bench: Bench) -> None:
    supervisor = bench.supervise(bench.child("a", *SLEEP), bench.child("b", "/nowhere/command"))
    with pytest.raises(FileNotFoundError), supervisor:
        supervisor.run_until(ended("a"))
    assert supervisor.exits.keys() == {"a"} and is_gone(supervisor.exits["a"].pid)


# --- starting again


class HangsOnceItHasWritten:
    def __init__(self, wrote: Callable[[], str]) -> None:
        self._wrote = wrote

    def progress(self) -> object:
        return None

    def hang(self, pid: int) -> str:
        return f"it wrote {self._wrote()!r}" if self._wrote() else ""


def test_a_child_that_hangs_is_killed_with_the_reason_and_started_again(bench: Bench) -> None:
    child = bench.python("a", DEAF, restart=Restart(), health=HangsOnceItHasWritten(lambda: bench.wrote("a")))
    with bench.supervise(child, look=lambda: len(bench.said) >= 2 and supervisor.stop()) as supervisor:
        supervisor.run_until(ended("a"))
    assert bench.said[:2] == ["killing a: it wrote 'deaf\\n'", "a ended (killed by SIGKILL); starting it again"]


def test_a_first_exit_that_every_start_would_repeat_is_final_and_a_later_one_is_not(bench: Bench) -> None:
    """What a process minds that has run before may pass."""
    once = "import os; n = os.stat('later.log').st_size; print('x'); raise SystemExit(2 if n else 1)"
    restart = Restart(unless_first_exit=2)
    children = [
        bench.python("first", "raise SystemExit(2)", restart=restart),
        bench.python("later", once, restart=restart),
    ]
    with bench.supervise(*children) as supervisor:
        exits = supervisor.run_until(ended("first", "later"))
    assert {name: (exit.code, exit.starts) for name, exit in exits.items()} == {"first": (2, 1), "later": (2, 6)}


LEAVES_CHILDREN = """
import subprocess, os, signal
left = subprocess.Popen(["sleep", "1000"])
deaf = subprocess.Popen(["sh", "-c", "trap '' TERM; echo; exec sleep 1000"], stdout=subprocess.PIPE)
deaf.stdout.readline()
shared = subprocess.Popen(["sleep", "1000"], start_new_session=True)
print(left.pid, deaf.pid, shared.pid, flush=True)
"""


@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_children_that_a_child_leaves_behind_end_but_for_those_with_a_session_of_their_own(
    bench: Bench, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LEFT_BEHIND_S", 0.2)
    with bench.supervise(bench.python("parent", LEAVES_CHILDREN + end)) as supervisor:
        supervisor.run_until(ended("parent"))
    left, deaf, shared = map(int, bench.wrote("parent").split())
    try:
        until(lambda: is_gone(left) and is_gone(deaf))
        assert not is_gone(shared)
    finally:
        os.kill(shared, signal.SIGKILL)


# --- the pauses, on a clock that only sleeping moves


class Life:
    """In place of a process: it dies at a given time."""

    pid = 4711

    def __init__(self, dies_at: float, clock: Callable[[], float], returncode: int) -> None:
        self._dies_at, self._clock, self.returncode = dies_at, clock, returncode

    def poll(self) -> int | None:
        return self.returncode if self._clock() >= self._dies_at else None

    def send_signal(self, number: int) -> None:
        """As for a process that has ended: nothing."""


class Deaths:
    """A child that dies as soon as it is started, unless `lives_s` says how long that start lives."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.starts: list[float] = []
        self.lives_s: dict[int, float] = {}  # by the number of the start, from 1
        self.code = 1
        self.works = False
        self.needed = True
        monkeypatch.setattr(supervisor_module, "FIRST_PAUSE_S", 1.0)
        monkeypatch.setattr(supervisor_module, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))
        monkeypatch.setattr(supervisor_module.subprocess, "Popen", self._start)
        health = SimpleNamespace(progress=self._progress, hang=lambda pid: "")
        self._child = bench.child("a", restart=Restart(while_needed=lambda: self.needed), health=health)
        self._bench = bench

    def pauses(self, seconds: float = 36000.0) -> list[int]:
        """Between the starts of a child that is watched for that long, or until it is given up."""
        end = self.now + seconds
        with self._bench.supervise(self._child) as supervisor:
            supervisor.run_until(lambda exits: self.now > end or "a" in exits)
        return [round(later - earlier) for earlier, later in pairwise(self.starts)]

    def _start(self, *command: object, **options: object) -> Life:
        self.starts.append(self.now)
        return Life(self.now + self.lives_s.get(len(self.starts), 0.0), lambda: self.now, self.code)

    def _sleep(self, seconds: float) -> None:
        self.now += 0.5

    def _progress(self) -> object:
        """It is asked for right after a start, and when the child has died."""
        return self.now if self.works else None


@pytest.fixture
def deaths(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Deaths:
    return Deaths(bench, monkeypatch)


def test_restarts_back_off_and_end_after_five(deaths: Deaths) -> None:
    assert deaths.pauses() == [1, 2, 4, 8, 16]


def test_a_child_that_is_not_needed_any_more_is_not_started_again(deaths: Deaths) -> None:
    deaths.needed = False
    assert deaths.pauses(60.0) == []


def test_a_child_that_lived_long_is_started_again_however_often_it_died_before(deaths: Deaths) -> None:
    """It was in the last of its restarts, and then worked for an hour."""
    deaths.lives_s[6] = 3600.0
    assert deaths.pauses() == [1, 2, 4, 8, 16, 3601, 2, 4, 8, 16]


@pytest.mark.parametrize(("code", "works", "most"), [(-9, True, 1), (-9, False, 16), (-11, True, 16), (1, True, 16)])
def test_a_child_that_is_killed_at_work_is_started_again_for_ever(
    deaths: Deaths, code: int, works: bool, most: int
) -> None:
    """An operator or the kernel killed it, so it is not a child that cannot start."""
    deaths.code, deaths.works = code, works
    deaths.lives_s = dict.fromkeys(range(1, 1000), 0.5)
    pauses = deaths.pauses(600.0)
    assert (len(pauses) > 100) == (most == 1)
    assert max(pauses) <= most + 1


def test_a_process_that_may_not_be_signalled_does_not_end_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward function may have started it by sudo."""
    monkeypatch.setattr(process, "_others_in_group", lambda leader: [psutil.Process()])
    monkeypatch.setattr(process, "is_alive", lambda one: False)
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    process.end_left_behind(os.getpid())
