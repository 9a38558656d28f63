"""A run from its launcher's side: command lines, what is shown, stops, and the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from stage import FINISH_WHEN_ALL_ARE_THERE, FOLLOW_THE_RUN, FOR_EVER, LAUNCH, REAL_PYTHON, Stage, launch_env

from async_grpo.cli.compute import server as server_command
from async_grpo.cli.compute import worker as worker_command
from async_grpo.errors import BadFileError, UsageError
from async_grpo.launch import host_memory, launcher
from async_grpo.launch.host_memory import MemoryWatch
from async_grpo.launch.launcher import NOTHING_TRAINED, launch
from async_grpo.records import WorkerId
from async_grpo.rundir import paths as runs
from async_grpo.settings import ArchiveLimit
from async_grpo.status.snapshot import look
from kit.archived_run import save_checkpoint
from kit.plans import planned
from kit.waiting import is_gone, until

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n(HERE / ('deaf' + ROLE)).touch()\nuntil(lambda: False)"


def test_the_children_s_own_lines_are_shown_with_their_names(stage: Stage) -> None:
    stage.children_are(
        server=f'print("12:00:00 INFO    at work"); {FINISH_WHEN_ALL_ARE_THERE}; print("12:00:01 INFO    bye")',
        worker=f"""
            print("12:00:00 INFO    detail"); print("noise")
            print("12:00:00 WARNING careful")
            {FOLLOW_THE_RUN}
        """,
    )
    stage.launch(worker_devices=("cpu", "cpu"))
    shown = stage.said().out.splitlines()
    assert "[server] 12:00:00 INFO    at work" in shown
    assert "[server] 12:00:01 INFO    bye" in shown
    for name in ("worker 1", "worker 2"):
        assert f"[{name}] 12:00:00 WARNING careful" in shown
    assert not any("noise" in line or "detail" in line for line in shown)
    assert "noise" in (log := stage.run.worker_log(WorkerId(1)).read_text()) and "detail" in log


def test_quiet_shows_warnings_and_what_the_launcher_has_to_decide(stage: Stage) -> None:
    stage.children_are(
        server=f'print("12:00:00 INFO    at work"); print("12:00:00 ERROR   no"); {FINISH_WHEN_ALL_ARE_THERE}',
        worker=FOLLOW_THE_RUN,
    )
    stage.launch(quiet=True)
    assert stage.said().out == "[server] 12:00:00 ERROR   no\n"


def test_the_plan_reaches_the_children_in_the_run_directory(stage: Stage) -> None:
    stage.children_are(server=FINISH_WHEN_ALL_ARE_THERE, worker=FOLLOW_THE_RUN)
    plan = stage.plan(steps=7, seed=0, max_staleness=2, keep_done=ArchiveLimit(5), log_level="DEBUG")
    launch(stage.run.root, plan)
    assert stage.run.state_of(None).plan == plan
    [(_, server, env)] = stage.starts("server")
    assert server == ["server", "--run-dir", str(stage.run.root), "--launched-by", str(os.getpid())]
    server_command.build_parser().parse_args(server[1:])
    for number in (1, 2):
        [(_, worker, _)] = stage.starts(f"worker{number}")
        assert worker == ["worker", *server[1:], "--id", str(number)]
        assert worker_command.build_parser().parse_args(worker[1:]).launched_by == os.getpid()
    assert int(env["OMP_NUM_THREADS"]) >= 1, "so that the processes do not fight over cores"


def test_a_server_that_fails_ends_everything_with_its_code_and_its_last_words(stage: Stage) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker2"))
            print("noise")
            print("error: no memory", file=sys.stderr)
            sys.exit(3)
        """,
        worker=FOR_EVER,
    )
    assert stage.launch() == 3
    captured = stage.said()
    why = "[launcher] the parameter server failed (exit code 3). Its last words:"
    assert captured.err == f"{why}\nerror: no memory\n", "AsyncGRPO raises it, and has no other words"
    assert "to continue the run" not in captured.out, "there is no checkpoint"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_a_server_that_is_killed_is_a_failure_that_names_the_signal(name: str, stage: Stage) -> None:
    stage.children_are(
        server="""
            until(lambda: started("worker2"))
            print("error: of long ago")
            print("12:00:00 WARNING the queue is slow")
            for step in range(50):
                print(f"12:00:01 STEP    step {step}/100", flush=True)
            until(lambda: (HERE / "saved").exists())
            os.kill(os.getpid(), signal.SIGKILL)
        """.replace("SIGKILL", name),
        worker=FOR_EVER,
    )

    def saves() -> None:
        until(lambda: stage.run.read_state() is not None)
        state = stage.run.update_state(output_dir=str(stage.folder / "out"))
        save_checkpoint(stage.folder / "out", state.run_id, 1)
        (stage.folder / "saved").touch()

    threading.Thread(target=saves, daemon=True).start()
    assert stage.launch() == 1
    said = stage.said()
    assert stage.run.state_of(None).why.startswith(f"the parameter server was killed by {name}")
    why, _, words = said.err.partition("\n")
    assert f"the parameter server failed (killed by {name}" in why and ("memory" in why) is (name == "SIGKILL")
    last_words = "error: of long ago\n12:00:00 WARNING the queue is slow\n12:00:01 STEP    step 49/100\n"
    assert words == last_words, "the launcher's screen has shown the steps"
    assert "to continue the run: " in said.out and "--resume" in said.out


def test_the_server_has_the_whole_stop_grace_and_deaf_workers_are_not_waited_for_that_long(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "STOP_GRACE_S", 0.1)
    stage.children_are(
        server="""
            def others_have_ended():
                for role in ("worker1", "worker2"):
                    pid = json.loads((HERE / ("starts_" + role)).read_text())[0]
                    until(lambda: not Path(f"/proc/{pid}").exists())
                (RUN / "checkpoint").touch()
            stop_when_asked(others_have_ended)
            (RUN / "consumed.jsonl").touch()
            until(lambda: all((HERE / ("deafworker" + number)).exists() for number in "12"))
            os.kill(os.getppid(), signal.SIGINT)
            until(lambda: False)
        """,
        worker=DEAF,
    )
    assert stage.launch(stop_grace=60.0) == 0
    assert (stage.run.root / "checkpoint").exists()
    assert "stopping: a checkpoint is written" in stage.said().out


def test_a_server_that_is_killed_after_the_stop_grace_is_told_with_what_to_do(stage: Stage) -> None:
    stage.children_are(
        server="""
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.kill(os.getppid(), signal.SIGTERM)
            until(lambda: False)
        """,
        worker=FOR_EVER,
    )
    assert stage.launch(stop_grace=0.1) == 0
    out = stage.said().out
    assert "the parameter server did not end in 0.1 s (--stop-grace) and was killed: --resume" in out


def test_accelerate_leaves_its_ranks_the_stop_grace(stage: Stage) -> None:
    child = launcher._server(stage.plan(accelerate_config=Path("fsdp.yaml"), stop_grace=120.5), stage.run)
    assert child.command[2] == "async_grpo.launch.accelerate_entry"
    assert (child.env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"], child.grace_s) == ("121", 120.5)
    on_ray = stage.plan(accelerate_config=Path("fsdp.yaml"), ray="auto", trainer_nodes=2)
    child = launcher._server(on_ray, stage.run)
    assert (child.command[2], child.grace_s) == ("async_grpo.nodes.ranks", 29.0)


def test_a_second_run_that_lost_leaves_the_summary_of_the_first_alone(stage: Stage) -> None:
    """Its server found the directory in use and ended; what lies there was written by the other's."""
    of_the_first = json.dumps({"server_pid": os.getpid(), "state": "finished", "worker_restarts": 0})
    stage.children_are(
        server=f"(RUN / 'summary.json').write_text({of_the_first!r})\nsys.exit('error: in use')", worker=FOLLOW_THE_RUN
    )
    assert stage.launch() == 1
    assert stage.run.summary.read_text() == of_the_first


def test_a_launcher_that_is_killed_leaves_no_child(stage: Stage) -> None:
    body = """
        from async_grpo.setup.process import end_with_parent
        end_with_parent(int(sys.argv[sys.argv.index("--launched-by") + 1]))
        (HERE / ("ready_" + ROLE)).touch()
        until(lambda: False)
    """
    stage.children_are(server=body, worker=body, flags="")
    with subprocess.Popen([REAL_PYTHON, "-c", LAUNCH, str(stage.folder)], env=launch_env()) as process:
        try:
            until(lambda: len(list(stage.folder.glob("ready_*"))) == 3)
        finally:
            process.kill()
    pids = stage.pids()
    assert len(pids) == 3
    until(lambda: all(is_gone(pid) for pid in pids))


def test_a_stop_before_the_processes_are_there_is_not_lost(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the first moments: the run directory would say for ever that a run is alive in it."""
    prepare = launcher.prepare

    def stopped_while_preparing(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return prepare(*args, **options)

    monkeypatch.setattr(launcher, "prepare", stopped_while_preparing)
    stage.children_are(server=FOR_EVER, worker=FOR_EVER)
    assert stage.launch() == NOTHING_TRAINED == 130
    assert stage.run.state_of(None).state == runs.STOPPED


@pytest.mark.parametrize("handler", ["", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))"])
def test_a_stop_before_the_first_step_says_that_nothing_was_trained(stage: Stage, handler: str) -> None:
    """Also where the server ends without a word: else the run would be starting for ever."""
    stage.children_are(server=f"{handler}\nos.kill(os.getppid(), signal.SIGINT)\n{FOR_EVER}", worker=FOR_EVER)
    assert stage.launch() == NOTHING_TRAINED
    said = stage.said().out.splitlines()
    assert said[-2:] == ["[launcher] stopping: everything ends", "[launcher] stopped, nothing was trained"]
    assert look(stage.run.root, details=False).state == runs.STOPPED


def test_a_run_that_is_moved_aside_is_said(stage: Stage) -> None:
    stage.children_are(server=FINISH_WHEN_ALL_ARE_THERE, worker=FOLLOW_THE_RUN)
    assert stage.launch() == 0
    assert "is now in" not in stage.said().out
    assert stage.launch() == 0
    [aside] = stage.run.root.parent.glob("run-*")
    assert f"[launcher] the run that was in {stage.run.root} is now in {aside}\n" in stage.said().out


def test_the_signal_for_stacks_ends_no_process_that_is_just_starting(stage: Stage) -> None:
    stage.children_are(
        server="os.kill(os.getpid(), signal.SIGUSR1)\n" + FINISH_WHEN_ALL_ARE_THERE,
        worker="os.kill(os.getpid(), signal.SIGUSR1)\n" + FOLLOW_THE_RUN,
    )
    assert stage.launch() == 0
    assert len(stage.pids()) == 3


def test_more_workers_than_memory_are_refused_before_anything_is_changed(stage: Stage) -> None:
    stage.children_are(server=FOR_EVER, worker=FOR_EVER)
    with pytest.raises(UsageError, match=r"1,000,000 workers need 400000.0 GB of memory .*room for [\d,]+ at most"):
        stage.launch(worker_devices=("cpu",) * 10**6)
    assert not stage.run.root.exists() and stage.pids() == []


def test_a_containers_limit_counts_as_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "memory_group", lambda: host_memory.MemoryGroup(limit=10**9, used=10**8))
    host_memory.require_memory(2)
    with pytest.raises(UsageError, match=r"900\.0 MB are free. There is room for 2 at most"):
        host_memory.require_memory(3)


def test_more_workers_than_cores_are_warned_of(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    stage.children_are(server=FINISH_WHEN_ALL_ARE_THERE, worker=FOLLOW_THE_RUN)
    assert stage.launch() == 0
    said = stage.said().out
    assert "2 workers and the server share 1 core, so each" in said and "server on cpu, 2 workers on cpu; logs" in said


def test_a_resume_that_cannot_even_be_launched_changes_nothing(stage: Stage) -> None:
    stage.children_are(server=FOR_EVER, worker=FOR_EVER)
    launcher.prepare(stage.run.root, planned(Path("my_trainer.py")))
    stage.run.update_state(state=runs.STOPPED, step=3)
    before = stage.run.state_file.read_bytes()
    stage.run.server_log.symlink_to(stage.folder / "elsewhere")
    with pytest.raises(BadFileError, match="links are not followed"):
        stage.launch(resume=True)
    assert stage.run.state_file.read_bytes() == before


def test_a_resume_that_is_stopped_while_the_server_loads_changes_nothing(stage: Stage) -> None:
    stage.children_are(server="os.kill(int(sys.argv[-1]), signal.SIGINT)\nuntil(lambda: False)", worker=FOR_EVER)
    launcher.prepare(stage.run.root, planned(Path("my_trainer.py")))
    stage.run.update_state(state=runs.FINISHED, step=3)
    before = stage.run.state_file.read_bytes()
    assert stage.launch(resume=True) == 0
    assert stage.run.state_file.read_bytes() == before


# --- Whether a killed process was killed for lack of memory, by what the kernel says -----------------------------


@pytest.fixture(params=["2", "1"])
def counter(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The counter of our group, in either version of control groups."""
    group = {"2": "a/b/memory.events", "1": "memory/a/b/memory.oom_control"}[request.param]
    line = {"2": "0::/a/b", "1": "4:cpu,memory:/a/b\n0::/"}[request.param]
    (tmp_path / group).parent.mkdir(parents=True)
    (tmp_path / group).write_text("oom_kill_disable 0\noom_kill 2\n")
    (tmp_path / "membership").write_text(f"9:pids:/\n{line}\n")
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    return tmp_path / group


def test_what_the_kernel_counts_meanwhile(counter: Path) -> None:
    watch = MemoryWatch()
    assert watch.verdict() == "by another process: its control group has reported no lack of memory"
    counter.write_text("oom_kill 3\n")
    assert watch.verdict().startswith("most likely out of memory: the kernel has killed a process of its control group")
    assert "no lack of memory" in MemoryWatch().verdict(), "what was before is no matter"


@pytest.mark.parametrize("says", ["nothing", "something else", "no membership"])
def test_a_kernel_that_does_not_count(counter: Path, says: str) -> None:
    if says == "nothing":
        counter.unlink()
    elif says == "something else":
        counter.write_text("under_oom 0\nx\n")
    else:
        host_memory._MEMBERSHIP.unlink()
    assert "no lack of memory" in MemoryWatch().verdict()
