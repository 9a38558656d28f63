"""The launcher with children that are a few lines long, in place of servers and workers that load a model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent, indent
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from async_grpo.cli import server as server_command
from async_grpo.cli import worker as worker_command
from async_grpo.launch import launcher
from async_grpo.launch.child_log import LogTail
from async_grpo.launch.launcher import LaunchOptions, launch
from async_grpo.records import WorkerId
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import LineReader
from async_grpo.rundir.paths import RunDir
from async_grpo.settings import TrainingSettings, WorkerSettings

DEADLINE_S = 60.0
REAL_PYTHON = sys.executable

# Takes the place of the interpreter: it is called as `PYTHON -m async_grpo.cli server --config …`.
FAKE_PYTHON = """\
#!{python} {flags}
import json, os, signal, sys, time
from pathlib import Path

HERE = Path(__file__).parent
ROLE = sys.argv[3] if sys.argv[3] == "server" else "worker" + sys.argv[sys.argv.index("--id") + 1]
RUN = Path(sys.argv[sys.argv.index("--run-dir") + 1])
with (HERE / ("starts_" + ROLE)).open("a") as file:
    file.write(json.dumps([os.getpid(), sys.argv[3:], dict(os.environ)]) + "\\n")

def state():
    return json.loads((RUN / "run.json").read_text())["state"]

def end_run(as_state):
    data = json.loads((RUN / "run.json").read_text())
    new = RUN / "run.json.new"
    new.write_text(json.dumps({{**data, "state": as_state, "step": 3}}))
    new.replace(RUN / "run.json")

def until(condition):
    while not condition():
        time.sleep(0.02)

def started(role):
    path = HERE / ("starts_" + role)
    return len(path.read_text().splitlines()) if path.exists() else 0

if ROLE == "server":
{server}
else:
{worker}
"""

FOLLOW_THE_RUN = 'until(lambda: state() != "running")'
FINISH_WHEN_ALL_ARE_THERE = 'until(lambda: started("worker1") and started("worker2")); end_run("finished")'
FOR_EVER = "until(lambda: False)"


class Stage:
    """A launcher's surroundings: the fake children's code, and what became of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.run = RunDir(folder / "run")

    def children_are(self, *, server: str, worker: str, flags: str = "-S") -> None:
        bodies = {"server": indent(dedent(server), "    "), "worker": indent(dedent(worker), "    ")}
        self.python.write_text(FAKE_PYTHON.format(python=REAL_PYTHON, flags=flags, **bodies))
        self.python.chmod(0o755)

    def options(self, **changes: Any) -> LaunchOptions:
        fields: dict[str, Any] = {
            "config": self.folder / "my_trainer.py",
            "run_dir": self.run.root,
            "master_device": "cpu",
            "worker_devices": ("cpu", "cpu"),
            "training": TrainingSettings(),
            "work": WorkerSettings(),
        }
        return LaunchOptions(**{**fields, **changes})

    def starts(self, role: str) -> list[tuple[int, list[str], dict[str, str]]]:
        """What has started in that role so far; a child may be writing its line just now."""
        lines = LineReader(self.folder / f"starts_{role}").new_lines()
        return [tuple(json.loads(line)) for line in lines]

    def pids(self) -> list[int]:
        return [start[0] for role in ("server", "worker1", "worker2") for start in self.starts(role)]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    monkeypatch.setattr(sys, "executable", str(stage.python))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield stage
    for number, handler in handlers.items():
        signal.signal(number, handler)
    left_behind = [pid for pid in stage.pids() if not is_gone(pid)]
    for pid in left_behind:
        os.kill(pid, signal.SIGKILL)
    assert left_behind == []


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def make_time_fly(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Back-off of half a minute in a moment; what would be long enough a life, or a stop, takes as long as before."""
    real = time.monotonic
    monkeypatch.setattr(
        launcher, "time", SimpleNamespace(monotonic=lambda: real() * factor, sleep=lambda seconds: time.sleep(0.005))
    )
    monkeypatch.setattr(launcher, "GRACE_S", 30.0 * factor)
    monkeypatch.setattr(launcher, "LIVED_LONG_ENOUGH_S", 600.0 * factor)


def test_a_run_that_finishes(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.children_are(server=FINISH_WHEN_ALL_ARE_THERE, worker=FOLLOW_THE_RUN)
    assert launch(stage.options()) == 0
    assert [len(stage.starts(role)) for role in ("server", "worker1", "worker2")] == [1, 1, 1]
    state = stage.run.read_state()
    assert state is not None and state.state == runs.FINISHED and state.num_workers == 2
    assert "server on cpu, 2 workers on cpu, cpu" in capsys.readouterr().out


def test_the_children_s_own_lines_are_shown_with_their_names(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.children_are(
        server=f'print("12:00:00 INFO    at work"); {FINISH_WHEN_ALL_ARE_THERE}; print("12:00:01 INFO    bye")',
        worker=f"""
            print("12:00:00 INFO    detail"); print("noise")
            print("12:00:00 WARNING careful")
            {FOLLOW_THE_RUN}
        """,
    )
    launch(stage.options(worker_devices=("cpu", "cpu")))
    shown = capsys.readouterr().out.splitlines()
    assert "[server] 12:00:00 INFO    at work" in shown
    assert "[server] 12:00:01 INFO    bye" in shown
    for name in ("worker 1", "worker 2"):
        assert f"[{name}] 12:00:00 WARNING careful" in shown
    assert not any("noise" in line or "detail" in line for line in shown)
    assert "noise" in (log := stage.run.worker_log(WorkerId(1)).read_text()) and "detail" in log


def test_quiet_shows_warnings_and_what_the_launcher_has_to_decide(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.children_are(
        server=f'print("12:00:00 INFO    at work"); print("12:00:00 ERROR   no"); {FINISH_WHEN_ALL_ARE_THERE}',
        worker=FOLLOW_THE_RUN,
    )
    launch(stage.options(quiet=True))
    assert capsys.readouterr().out == "[server] 12:00:00 ERROR   no\n"


def test_the_options_reach_the_children(stage: Stage) -> None:
    stage.children_are(server=FINISH_WHEN_ALL_ARE_THERE, worker=FOLLOW_THE_RUN)
    options = stage.options(
        training=TrainingSettings(steps=7, seed=0, max_staleness=2, max_attempts=5), log_level="DEBUG"
    )
    launch(options)
    [(_, server, env)] = stage.starts("server")
    args = server_command.build_parser().parse_args(server[1:])
    assert (args.steps, args.seed, args.max_staleness, args.max_attempts) == (7, 0, 2, 5)
    assert (args.device, args.config, args.log_level) == ("cpu", options.config, "DEBUG")
    assert args.launched_by == os.getpid()
    for number in (1, 2):
        [(_, worker, _)] = stage.starts(f"worker{number}")
        args = worker_command.build_parser().parse_args(worker[1:])
        assert (args.id, args.device, args.run_dir) == (number, "cpu", stage.run.root)
        assert args.launched_by == os.getpid()
    assert int(env["OMP_NUM_THREADS"]) >= 1, "so that the processes do not fight over cores"


def test_a_server_that_fails_ends_everything_with_its_code_and_its_last_words(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker2"))
            print("noise")
            print("error: no memory", file=sys.stderr)
            sys.exit(3)
        """,
        worker=FOR_EVER,
    )
    assert launch(stage.options()) == 3
    captured = capsys.readouterr()
    assert "the parameter server failed (exit code 3)" in captured.out
    assert captured.err == "error: no memory\n"


def test_a_server_that_is_killed_is_a_failure_that_names_the_signal(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.children_are(server="os.kill(os.getpid(), signal.SIGKILL)", worker=FOR_EVER)
    assert launch(stage.options()) == 1
    assert "the parameter server failed (killed by SIGKILL)" in capsys.readouterr().out


def test_a_stop_is_passed_on_and_everybody_has_time_for_it(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.children_are(
        server="""
            def stop(*_):
                time.sleep(0.3)
                (RUN / "checkpoint").touch()
                end_run("stopped")
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            (HERE / "ready").touch()
            until(lambda: False)
        """,
        worker=FOR_EVER,
    )

    def user() -> None:
        eventually(lambda: (stage.folder / "ready").exists() and stage.starts("worker2"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=user, daemon=True).start()
    assert launch(stage.options()) == 0
    assert (stage.run.root / "checkpoint").exists()
    assert "stopping: a checkpoint is written" in capsys.readouterr().out


def test_a_child_that_ignores_the_stop_is_killed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.3)
    stage.children_are(
        server="end_run('stopped')\nuntil(lambda: False)",
        worker="signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(HERE / ('deaf' + ROLE)).touch()\nuntil(lambda: False)",
    )

    def user() -> None:
        eventually(lambda: all((stage.folder / f"deafworker{number}").exists() for number in (1, 2)))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=user, daemon=True).start()
    assert launch(stage.options()) == 0  # and the stage looks for children that were left behind


def test_a_worker_that_dies_is_started_again_while_the_run_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_time_fly(monkeypatch, 100.0)
    stage.children_are(
        server=f"""
            summary = {{"server_pid": os.getpid(), "state": "finished", "run_id": "x"}}
            (RUN / "summary.json").write_text(json.dumps(summary))
            until(lambda: started("worker1") == 3)
            {"end_run('finished')"}
        """,
        worker=f"""
            if ROLE == "worker1" and started(ROLE) < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            {FOLLOW_THE_RUN}
        """,
    )
    assert launch(stage.options()) == 0
    assert len(stage.starts("worker2")) == 1
    assert capsys.readouterr().out.count("worker 1 ended (killed by SIGKILL); starting it again") == 2
    assert '"worker_restarts": 2' in stage.run.summary.read_text()


def test_a_second_run_that_lost_leaves_the_summary_of_the_first_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server found the directory in use and ended; what lies there was written by the other's."""
    of_the_first = json.dumps({"server_pid": os.getpid(), "state": "finished", "worker_restarts": 0})
    stage.children_are(
        server=f"(RUN / 'summary.json').write_text({of_the_first!r})\nsys.exit('error: in use')", worker=FOLLOW_THE_RUN
    )
    assert launch(stage.options()) == 1
    assert stage.run.summary.read_text() == of_the_first


def test_workers_that_keep_dying_are_given_up_after_five_restarts_with_their_last_words(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_time_fly(monkeypatch, 200.0)
    stage.children_are(server=FOR_EVER, worker='sys.exit("error: no model")')
    assert launch(stage.options()) == 1
    assert len(stage.starts("worker1")) == len(stage.starts("worker2")) == 1 + 5
    captured = capsys.readouterr()
    assert "gave up: every worker failed 6 times in a row. The last words of log_worker_1.txt" in captured.out
    assert captured.err == "error: no model\n"


def test_a_worker_that_refuses_its_setup_ends_the_run_at_once_with_its_words_and_a_checkpoint(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.children_are(
        server="""
            def stop(*_):
                (RUN / "checkpoint").touch()
                end_run("stopped")
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            (HERE / "ready").touch()
            until(lambda: False)
        """,
        worker="""
            if ROLE == "worker1": until(lambda: False)
            until((HERE / "ready").exists)
            print("noise\\nerror: use_vllm=True: vLLM is not installed here", file=sys.stderr)
            sys.exit(2)
        """,
    )
    assert launch(stage.options()) == 2
    assert (stage.run.root / "checkpoint").exists()
    assert len(stage.starts("worker2")) == 1, "it would say the same again"
    captured = capsys.readouterr()
    assert "worker 2 refused its setup, and would again: everything ends" in captured.out
    assert "Mend what worker 2 says, then go on: " in captured.out and "--resume" in captured.out
    assert captured.err == "error: use_vllm=True: vLLM is not installed here\n"


def test_a_refusal_before_training_is_told_to_start_again(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.children_are(
        server="""
            def stop(*_):
                data = json.loads((RUN / "run.json").read_text())
                (RUN / "run.json").write_text(json.dumps({**data, "state": "stopped"}))
                sys.exit(0)
            signal.signal(signal.SIGTERM, stop)
            (HERE / "ready").touch()
            until(lambda: False)
        """,
        worker='until((HERE / "ready").exists)\nsys.exit(2)',
    )
    assert launch(stage.options()) == 2
    assert "says, then start again\n" in capsys.readouterr().out


def test_what_a_worker_minds_that_has_run_before_may_pass(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed, and then the model could not be fetched for a moment."""
    make_time_fly(monkeypatch, 100.0)
    stage.children_are(
        server='until(lambda: started("worker1") == 3); end_run("finished")',
        worker=f"""
            if ROLE == "worker1" and started(ROLE) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if ROLE == "worker1" and started(ROLE) == 2:
                sys.exit(2)
            {FOLLOW_THE_RUN}
        """,
    )
    assert launch(stage.options()) == 0
    assert len(stage.starts("worker1")) == 3


def test_one_worker_that_is_given_up_does_not_end_the_run_of_the_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_time_fly(monkeypatch, 200.0)
    stage.children_are(
        server='until(lambda: started("worker1") == 6); time.sleep(0.2); end_run("finished")',
        worker=f'if ROLE == "worker1": sys.exit(1)\n{FOLLOW_THE_RUN}',
    )
    assert launch(stage.options()) == 0
    assert len(stage.starts("worker1")) == 6


def test_a_worker_that_hangs_on_a_job_is_killed_and_started_again(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    claim = 'CLAIM = RUN / "queue" / "0000000001.a00_processing_by_dev1.safetensors"'
    stage.children_are(
        server=f"""
            {claim}
            CLAIM.parent.mkdir()
            until(CLAIM.exists)
            pid = json.loads((HERE / "starts_worker1").read_text())[0]
            until(lambda: not Path(f"/proc/{{pid}}").exists())
            CLAIM.unlink()
            until(lambda: started("worker1") == 2)
            end_run("finished")
        """,
        worker=f"""
            {claim}
            if started(ROLE) == 1:
                until(CLAIM.parent.exists)
                CLAIM.touch()
                until(lambda: False)
            {FOLLOW_THE_RUN}
        """,
    )
    assert launch(stage.options(worker_devices=("cpu",), worker_timeout_s=0.2)) == 0
    out = capsys.readouterr().out
    assert "worker 1 made no progress for 0.2 s: killing it" in out
    assert "worker 1 ended (killed by SIGKILL); starting it again" in out


LAUNCH = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_launcher import Stage
from async_grpo.launch.launcher import launch
stage = Stage(Path(sys.argv[1]))
sys.executable = str(stage.python)
launch(stage.options())
"""


def test_a_launcher_that_is_killed_leaves_no_child(stage: Stage) -> None:
    body = """
        from async_grpo.setup.process import end_with_parent
        end_with_parent(int(sys.argv[sys.argv.index("--launched-by") + 1]))
        (HERE / ("ready_" + ROLE)).touch()
        until(lambda: False)
    """
    stage.children_are(server=body, worker=body, flags="")
    command = [REAL_PYTHON, "-c", LAUNCH, str(stage.folder), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: len(list(stage.folder.glob("ready_*"))) == 3)
        finally:
            process.kill()
    pids = stage.pids()
    assert len(pids) == 3
    eventually(lambda: all(is_gone(pid) for pid in pids))


# --- the back-off, on a clock that the test moves


class DeadProcess:
    returncode = 1

    def poll(self) -> int:
        return self.returncode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


@pytest.fixture
def minding(stage: Stage, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[float]]:
    """`minding(seconds)`: watch for so long a worker that dies at once; gives the times of its starts."""
    runs.prepare(stage.run.root, config=Path("my_trainer.py"))
    starts: list[float] = []

    def start(self: Any, child: Any) -> None:
        child.process, child.started, child.restart_at = DeadProcess(), clock.now, None
        starts.append(clock.now)

    monkeypatch.setattr(launcher._Launcher, "_start", start)
    boss = launcher._Launcher(stage.options())
    worker = launcher._Child(name="worker 1", command=[], log=LogTail(stage.folder / "log", "worker 1"))
    start(boss, worker)

    def watch(seconds: float) -> list[float]:
        end = clock.now + seconds
        while clock.now < end:
            boss._mind(worker)
            clock.now += 0.5
        return starts

    watch.worker = worker  # type: ignore[attr-defined]
    return watch


def test_restarts_back_off_and_end_after_five(minding: Any) -> None:
    starts = minding(3600.0)
    pauses = [round(later - earlier) for earlier, later in pairwise(starts)]
    assert pauses == [1, 2, 4, 8, 16]
    assert minding.worker.ended_for_good


def test_a_worker_that_lived_long_is_started_again_however_often_it_died_before(minding: Any, clock: Any) -> None:
    """It was in the last of its restarts, and then worked for an hour."""
    assert len(minding(40.0)) == 6
    minding.worker.ended_for_good = False
    minding.worker.started = clock.now - 3600.0
    minding.worker.restart_at = None
    starts = minding(3600.0)
    assert len(starts) == 6 + 5


@pytest.mark.parametrize(("code", "moved", "starts"), [(-9, True, 20), (-9, False, 6), (-11, True, 6), (1, True, 6)])
def test_a_worker_that_is_killed_at_work_is_started_again_for_ever(
    minding: Any, monkeypatch: pytest.MonkeyPatch, code: int, moved: bool, starts: int
) -> None:
    """An operator or the kernel killed it, so it is no worker that cannot start."""
    monkeypatch.setattr(DeadProcess, "returncode", code)
    minding.worker.stall = SimpleNamespace(count=lambda: b"1" if moved else None)
    assert min(len(minding(60.0)), 20) == starts


def test_no_worker_is_started_when_the_run_is_over(minding: Any, stage: Stage) -> None:
    stage.run.update_state(state=runs.FINISHED)
    assert len(minding(60.0)) == 1
