"""One look at a run directory, in every state that it may be found in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console, RenderableType

from async_grpo.cli import main
from async_grpo.errors import RunDirError, WaitTimeoutError
from async_grpo.evals import asking
from async_grpo.queue.liveness import worker_lock
from async_grpo.records import WorkerId
from async_grpo.rundir import paths as runs
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.locks import KernelLock, server_lock
from async_grpo.rundir.paths import RunDir, activity_file
from async_grpo.rundir.summary import next_command
from async_grpo.status import diagnosis
from async_grpo.status.diagnosis import DEAD, Shares
from async_grpo.status.render import panel, report
from async_grpo.status.snapshot import look
from async_grpo.telemetry import run_log
from async_grpo.telemetry.activity import ENDING, EVALUATING, GENERATING, LOADING, STARTING, TRAINING, Activity
from kit.plans import planned

SRC = Path(__file__).parents[3] / "src"

# A process that holds a lock and says what it does, until its standard input is closed.
ACTOR = """
import sys, time
from pathlib import Path
from async_grpo.telemetry.activity import activity
from async_grpo.records import WorkerId
from async_grpo.rundir.locks import KernelLock
from async_grpo.queue.liveness import worker_lock
root, name, run_id, what = Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4]
lock = KernelLock(root / "server.lock") if name == "server" else worker_lock(root, WorkerId.parse(name))
lock.path.parent.mkdir(exist_ok=True)
assert lock.try_acquire({"role": "parameter server"} if name == "server" else {"torch_device": "cpu"})
if what != "starting":
    activity.publish(root, name, device="cpu", run_id=run_id, state="loading", stall_after_s=float(sys.argv[5]))
if what not in ("starting", "loading"):
    activity.trains(step=40, total_steps=100, max_staleness=4)
    activity.has_jobs([7, 9] if name != "server" else [], what)
    activity.doing(what, version=40)
    activity.flush()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    prepare(tmp_path / "worker", planned(tmp_path / "my_trainer.py", workers=2))
    return RunDir(tmp_path / "worker")


@pytest.fixture
def start(run: RunDir) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start("dev1", GENERATING)`: a process of the run that is alive and doing this."""
    actors = []

    def begin(name: str, what: str, stall_after_s: float = 1000.0) -> subprocess.Popen[str]:
        arguments = [str(run.root), name, run.read_state().run_id, what, str(stall_after_s)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(SRC)}}
        actor = subprocess.Popen([sys.executable, "-c", ACTOR, *arguments], text=True, **pipes)
        actors.append(actor)
        assert actor.stdout.readline() == "ready\n"
        return actor

    yield begin
    for actor in actors:
        actor.kill()
        actor.communicate()


def kill(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def text_of(picture: RenderableType, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, highlight=False)
    console.print(picture)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def log_steps(run: RunDir, steps: list[dict[str, Any]]) -> None:
    run.metrics.write_text("".join(json.dumps({"loss": 0.1, **step}) + "\n" for step in steps))


# --- the states


def test_files_of_other_names_are_none_of_ours(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", TRAINING)
    start("dev1", GENERATING)
    record = activity_file(run.root, "dev1").read_bytes()
    for name in ("devX", "dev1 (copy)", "dev", "rank1", "dev12345"):
        activity_file(run.root, name).write_bytes(record)
    (run.root / "alive" / "devX.lock").touch()
    assert [worker.name for worker in look(run.root).workers] == ["dev1"]


def test_a_live_run(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", TRAINING)
    worker = start("dev1", GENERATING)
    (run.root / "queue").mkdir()
    for name in ("0000000007.a00_processing_by_dev1", "0000000009.a00_pending", "noise"):
        (run.root / "queue" / f"{name}.safetensors").touch()
    now = time.monotonic()
    half = {"async/rollouts_per_second": 50.0, "async/staleness_mean": 1.5, "async/staleness_max": 3.0}
    last = {"step": 40, "monotonic_s": now + 0.2, **half}
    log_steps(run, [{"step": 39, "monotonic_s": now, "reward": 0.25, **half}, last])
    view = look(run.root)
    assert (view.state, view.step, view.total_steps, view.num_workers) == (TRAINING, 40, 100, 2)
    assert view.live and view.sentence == "the run is training."
    [dev1] = view.workers
    assert (dev1.name, dev1.alive, dev1.pid, dev1.version, dev1.state) == ("dev1", True, worker.pid, 40, GENERATING)
    assert [job["group"] for job in dev1.jobs] == [7, 9]
    assert (view.queue.pending, view.queue.processing, view.queue.oldest_group) == (1, 1, 7)
    assert view.queue.oldest_s is not None
    for width in (80, 120):
        for picture in (report(view), panel(view)):
            text = text_of(picture, width)
            for part in ("step 40/100", "server", "dev1", "generating 2 groups for", "1 pending, 1 in process"):
                assert part in text
    json.dumps(view.to_json())


def test_a_run_that_is_loaded_with_workers_that_were_there_first(run: RunDir, start: Callable[..., Any]) -> None:
    assert look(run.root).state == STARTING
    start("dev1", LOADING)
    assert look(run.root).state == STARTING
    start("server", "starting")
    assert look(run.root).state == STARTING
    start("dev2", "starting")
    assert [(w.name, w.state) for w in look(run.root).workers] == [("dev1", LOADING), ("dev2", STARTING)]
    assert main(["status", str(run.root)]) == 0


def test_loading(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", LOADING)
    view = look(run.root)
    assert (view.state, view.total_steps) == (LOADING, None)
    for picture in (report(view), panel(view)):
        assert "the parameter server is loading my_trainer.py" in text_of(picture)


def test_a_run_whose_server_was_killed(run: RunDir, start: Callable[..., Any], capsys: Any) -> None:
    server = start("server", TRAINING)
    start("dev1", GENERATING)
    kill(server, start("dev2", GENERATING))
    view = look(run.root)
    assert (view.state, view.live) == (DEAD, False)
    assert f"(pid {server.pid}, last seen training) was killed, or the machine went down." in view.sentence
    assert "1 worker waits for it to come back" in view.sentence and "--resume" in view.sentence
    assert [(worker.name, worker.alive) for worker in view.workers] == [("dev1", True), ("dev2", False)]
    assert main(["status", str(run.root)]) == 1
    assert "dead; it was generating" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "code"), [(runs.FINISHED, 0), (runs.STOPPED, 0), (runs.FAILED, 1)])
def test_a_run_that_has_ended(run: RunDir, state: str, code: int, capsys: Any) -> None:
    write_json(run.summary, {"state": state, "steps": 12, "wall_seconds": 90.0, "rollouts": 768})
    run.update_state(state=state, step=12)
    assert (look(run.root).state, look(run.root).step) == (state, 12)
    assert main(["status", str(run.root), "--watch"]) == code, "a watch ends with the run"
    out = " ".join(capsys.readouterr().out.split())
    assert "12 steps in 90 s, 768 rollouts" in out
    assert ("board" in out) == (state == runs.FINISHED) and ("--resume" in out) == (state != runs.FINISHED)
    assert ("log_parameter_server.txt" in out.replace(" ", "")) == (state == runs.FAILED)


def test_a_run_that_ends_just_now(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", TRAINING)
    run.update_state(state=runs.STOPPED)
    assert look(run.root).state == ENDING


def test_a_resumed_run_does_not_show_the_dead_of_the_one_before(run: RunDir, start: Callable[..., Any]) -> None:
    kill(start("dev3", GENERATING))
    start("server", TRAINING)
    assert look(run.root).workers == ()
    assert "no live worker" in look(run.root).sentence
    assert look(run.root).bottleneck == "no worker is alive: start one with `async-grpo worker`"
    plan = run.read_state().plan
    with_nodes = replace(plan, launch=replace(plan.launch, ray="auto"))
    assert "log_nodes.txt says why no node has any" in with_nodes.way_to_workers


def test_a_run_that_is_resumed_starts_and_is_not_dead(run: RunDir, start: Callable[..., Any]) -> None:
    kill(start("server", TRAINING), start("dev1", GENERATING))
    assert look(run.root).state == DEAD
    prepare(run.root, planned(Path("my_trainer.py"), resume=True))
    view = look(run.root)
    assert (view.state, view.live, view.workers) == (STARTING, True, ())


# --- bad input: a sentence each


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (None, "no run.json"),
        ('{"format": 4, "run_', "is not valid JSON"),
        ('{"format": 99}', "another version"),
        ('{"format": 4, "surprise": 2}', "not the record of a run"),
    ],
)
def test_what_is_no_run_is_refused_with_a_sentence_and_exit_code_2(
    record: str | None, says: str, tmp_path: Path, capsys: Any
) -> None:
    if record is not None:
        (tmp_path / "run.json").write_text(record)
    refused = {tmp_path: says, tmp_path / "nowhere": "does not exist, so no run has begun there (yet)"}
    for path, sentence in {**refused, Path(__file__): "is a file"}.items():
        assert main(["status", str(path)]) == 2
        said = capsys.readouterr()
        assert sentence in said.err and said.out == ""


def test_workers_that_wait_where_no_run_is_yet(tmp_path: Path) -> None:
    (tmp_path / "alive").mkdir()
    lock = worker_lock(tmp_path, WorkerId(1))
    assert lock.try_acquire({"torch_device": "cpu"})
    with lock, pytest.raises(RunDirError, match="dev1 wait for a parameter server"):
        look(tmp_path)


def test_a_directory_of_somebody_else(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(self: KernelLock) -> None:
        raise PermissionError(13, "Permission denied", str(self.path))

    monkeypatch.setattr(KernelLock, "holder", forbidden)
    with pytest.raises(RunDirError, match=r"server.lock may not be read by this user"):
        look(run.root)


def test_files_that_are_half_written_missing_or_garbled(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", TRAINING)
    now = time.monotonic()
    log_steps(run, [{"step": 1, "monotonic_s": now}, {"step": 2, "monotonic_s": now + 1}])
    with run.metrics.open("a") as file:
        file.write('garbled\n[1, 2]\n{"step": 3}\n{"step": 3, "lo')
    run.summary.write_text("{")
    activity_file(run.root, "dev7").write_bytes(b"\xff" * 100)
    for name in ("queue", "quarantine"):
        (run.root / name).mkdir()
        (run.root / name / "noise").touch()
    view = look(run.root)
    assert (view.state, view.workers, view.jobs_quarantined) == (TRAINING, (), 0)
    text_of(report(view))


def test_quarantined_groups_with_their_reasons(run: RunDir, start: Callable[..., Any]) -> None:
    start("server", TRAINING)
    (run.root / "quarantine").mkdir()
    for number in range(8):
        path = run.root / "quarantine" / f"{number:010d}.a02_failed"
        path.with_suffix(".a02_failed.safetensors").touch()
        path.with_suffix(".a02_failed.reason").write_text(f"Traceback …\nValueError: no {number}\x1b[31m")
    (run.root / "quarantine" / "0000000009.a00_broken_pending.safetensors").touch()
    view = look(run.root)
    assert view.jobs_quarantined == 8, "an unusable file was issued again"
    assert [aside["group"] for aside in view.quarantined] == [*range(8), 9]
    text = text_of(report(view))
    assert "async-grpo queue 'my run' quarantine" in text_of(report(replace(view, run_dir="my run")))
    assert "group 7, try 3, given up: ValueError: no 7\\x1b[31m" in text and "and 4 before these" in text


def test_the_warning_of_a_run_whose_policy_ran_away(run: RunDir, start: Callable[..., Any]) -> None:
    run.update_state(tips="The policy runs away from its rollouts at step 41: …")
    start("server", TRAINING)
    for picture in (report(look(run.root)), panel(look(run.root))):
        assert "runs away from its rollouts at step 41" in text_of(picture)
    run.update_state(state=runs.FINISHED)
    assert look(run.root).to_json()["tips"] in text_of(report(look(run.root)), width=200)


# --- stalls, rates, the bottleneck


def test_a_process_that_is_paused_stalls_and_it_is_said_how_it_goes_on(run: RunDir, start: Callable[..., Any]) -> None:
    import signal

    worker = start("dev1", GENERATING, stall_after_s=0.001)
    start("server", TRAINING)
    os.kill(worker.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not (view := look(run.root)).workers[0].paused:
        assert time.monotonic() < deadline
    [stall] = view.stalls
    assert stall.startswith("dev1: no progress for ") and f"kill -CONT {worker.pid}" in stall
    assert not view.bottleneck.startswith("nothing moves"), "the trainer has not missed it yet"
    assert "paused by a signal" in text_of(panel(view))


def test_rates_are_of_the_last_minute_read_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": 900, "loss": 0.1, "monotonic_s": 9999.0}]  # before the machine was restarted
    rows += [{"step": step, "loss": 0.1, "monotonic_s": 100.0 + step, "reward": step / 1000} for step in range(500)]
    rows.insert(-1, {"step": 499, "eval_reward": 0.5, "monotonic_s": 598.5})
    path.write_text("".join(json.dumps({**row, "filling": "x" * 2000}) + "\n" for row in rows))
    steps = run_log.last_steps(path, now=600.0, since=50.0)
    rates = run_log.rates(steps, now=600.0)
    assert rates is not None
    assert (steps[0]["monotonic_s"], rates.reward) == (540.0, 0.499)
    assert rates.steps_per_second == pytest.approx(59 / 60, rel=0.02)
    assert [step["step"] for step in run_log.last_steps(path, now=9000.0, since=50.0)] == [498, 499], "slow steps"
    assert run_log.last_steps(path, now=9000.0, since=599.5) == [], "an earlier process wrote these"
    assert run_log.last_steps(tmp_path / "none", now=1.0, since=0.0) == []
    assert run_log.rates([], now=1.0) is None


BUSY = {"trainer_waits": 0.41, "workers_busy": 0.95, "workers_scoring": 0.1}
SHARES = Shares(window_s=60.0, workers=2, max_staleness=4, on_cpu=False, **BUSY)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({}, ["workers are the bottleneck", "waited 41% of the last minute", "--num-workers", "--groups-per-claim"]),
        ({"on_cpu": True, "window_s": 20.0}, ["of the last 20 s", "shorten the completions"]),
        ({"workers_scoring": 0.8}, ["reward functions are the bottleneck", "--score-concurrency", "thread_safe"]),
        ({"workers_busy": 0.5, "max_staleness": 0}, ["take turns", "--max-staleness (now 0)"]),
        ({"trainer_waits": 0.02, "workers_busy": 0.4}, ["the trainer is the bottleneck", "--num-workers 1 would do"]),
        ({"by_hand": True}, ["workers are the bottleneck", "start another `async-grpo worker` or raise"]),
        ({"by_hand": True, "trainer_waits": 0.02, "workers_busy": 0.4}, ["the trainer is", "1 worker would"]),
        ({"trainer_waits": 0.02, "workers_busy": 0.6}, ["the trainer is", "more workers would not help"]),
        ({"trainer_waits": 0.02}, ["balanced"]),
    ],
)
def test_the_bottleneck_in_one_sentence_with_what_to_change(changes: dict[str, Any], parts: list[str]) -> None:
    sentence = diagnosis.bottleneck_of(replace(SHARES, **changes))
    assert all(part in sentence for part in parts), sentence


def test_a_finished_run_that_was_renamed_says_where_it_ran(run: RunDir) -> None:
    run.update_state(state=runs.FINISHED)
    assert "It ran in" not in look(run.root).sentence
    renamed = run.root.rename(run.root.with_name("first"))
    assert f"It ran in {run.root.resolve()}; this directory was moved, renamed or copied" in look(renamed).sentence


# --- What the screen shows of `async-grpo evaluate`, which has problems and no steps -----------------------------


def test_an_evaluation_without_training_has_a_bar_of_problems(tmp_path: Path) -> None:
    run_id = prepare(tmp_path / "evaluation", planned(tmp_path / "x.py")).run_id
    root, lock, server = tmp_path / "evaluation", server_lock(tmp_path / "evaluation"), Activity()
    assert lock.try_acquire({"role": "evaluation"})
    server.publish(root, "server", device="cpu", run_id=run_id, state=LOADING, stall_after_s=60)
    assert "is loading x.py" in text_of(panel(look(root))), "its process is alive, and no parameter server was killed"
    server.doing(EVALUATING, version=0)
    server.evaluates(answered=30, problems=120, eta_s=9.0)
    text = text_of(panel(look(root)))
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


# --- The state of a run in words, as `status` prints it ----------------------------------------------------------


@pytest.mark.parametrize("state", [runs.FINISHED, runs.STOPPED, runs.FAILED])
def test_the_command_to_paste_is_one_line_of_its_own(
    state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path / "a_folder_with_a_long_name_that_no_terminal_of_eighty_columns_has_room_for")
    prepare(run.root, planned(tmp_path / "my_trainer.py", workers=2))
    run.update_state(state=state, step=12)
    monkeypatch.setenv("COLUMNS", "80")
    main(["status", str(run.root)])
    assert f"  {next_command(state, run)}" in capsys.readouterr().out.splitlines()
