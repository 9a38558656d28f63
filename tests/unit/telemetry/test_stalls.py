"""When silence counts as a stall of this process, and when as a hang of a worker."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_grpo.formatting import for_people
from async_grpo.records import WorkerId
from async_grpo.rundir.paths import activity_file
from async_grpo.telemetry import activity as activity_module
from async_grpo.telemetry import stalls, waiting
from async_grpo.telemetry.activity import (
    GENERATING,
    LOADING,
    SCORING,
    TRAINING,
    WAITING,
    Activity,
    ActivityRecord,
    read_activity,
    read_all,
    read_count,
)
from async_grpo.telemetry.stalls import HangDetector, StallReporter, describe, last_progress_s
from async_grpo.telemetry.waiting import Reminder, wait_until


def worker(root: Path, name: str = "dev1", state: str = LOADING) -> Activity:
    """A process of the run in `root` that writes what it does."""
    writer = Activity()
    writer.publish(root, name, device="cpu", run_id="run", state=state, stall_after_s=60)
    return writer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that shows `now`."""
    clock = SimpleNamespace(now=1000.0)
    time = SimpleNamespace(monotonic=lambda: clock.now, sleep=lambda seconds: None)
    for module in (activity_module, stalls):
        monkeypatch.setattr(module, "time", time)
    return clock


def record(name: str, progress_s: float, *waits_on: str, **more: object) -> ActivityRecord:
    state = WAITING if waits_on else GENERATING
    return ActivityRecord(name=name, progress_s=progress_s, state=state, waits_on=waits_on, **more)  # type: ignore[arg-type]


def test_a_process_is_not_stalled_while_one_that_it_waits_for_makes_progress() -> None:
    records = {
        "server": record("server", 10.0, "dev1"),
        "dev1": record("dev1", 95.0),
        "dev2": record("dev2", 20.0, "server"),
        "dev3": record("dev3", 30.0, "dev4"),
    }
    assert last_progress_s("dev2", records) == 95.0, "through the server"
    assert last_progress_s("dev3", records) == 30.0, "nobody knows dev4"
    records["dev1"] = record("dev1", 40.0, "server")
    assert last_progress_s("dev2", records) == 40.0, "a circle ends"


def test_a_stall_is_reported_once_and_again_when_it_has_lasted_twice_as_long(
    tmp_path: Path, clock: SimpleNamespace, warnings: list[str]
) -> None:
    writer = worker(tmp_path)
    warning = StallReporter(writer, tmp_path, 60.0)
    writer.has_jobs([13, 14], SCORING)
    writer.doing(SCORING)

    def lasts(seconds: int) -> list[str]:
        warnings.clear()
        for _ in range(seconds):
            clock.now += 1
            warning.look(clock.now)
        return list(warnings)

    assert lasts(59) == []
    assert lasts(1) == ["no progress for 60 s: scoring 2 groups for 60 s"]
    assert lasts(59) == []
    assert lasts(1) == ["no progress for 2 min: scoring 2 groups for 2 min"]
    writer.progress()
    assert lasts(59) == []
    assert len(lasts(1)) == 1, "another stall"


def test_the_warning_names_what_is_waited_for_and_what_the_others_do(
    tmp_path: Path, clock: SimpleNamespace, warnings: list[str]
) -> None:
    worker(tmp_path, "dev1", state=LOADING)
    server = worker(tmp_path, "server")
    server.waits("4 more groups from 1 worker", ["dev1"])
    clock.now += 61
    StallReporter(server, tmp_path, 60.0).look(clock.now)
    assert warnings == [], "loading takes its time"
    clock.now += stalls.LOADING_S
    StallReporter(server, tmp_path, 60.0).look(clock.now)
    [said] = warnings
    assert said.startswith("no progress for 61 s: waiting 5 min for 4 more groups from 1 worker; dev1 is loading for")


def test_the_thread_looks_by_itself(tmp_path: Path, warnings: list[str]) -> None:
    with closing(StallReporter(worker(tmp_path, state=GENERATING), tmp_path, 0.05).start()):
        wait_until(lambda: warnings or None, what="a warning", timeout_s=60, poll_s=0.01)
    assert warnings[0].startswith("no progress for ")


def test_a_state_without_jobs_and_one_with_jobs_of_another_phase() -> None:
    assert describe(ActivityRecord(state=LOADING, since_s=10.0), 12.0) == "loading for 2.0 s"
    jobs = (activity_module.JobActivity(5, SCORING, 10.0),)
    assert describe(ActivityRecord(state=GENERATING, jobs=jobs), 22.0) == "scoring group 5 for 12 s"


# --- hangs


class Watch:
    """Looks at worker dev1 with a timeout of a minute."""

    def __init__(self, root: Path, clock: SimpleNamespace) -> None:
        self.clock = clock
        self.detector = HangDetector(root, WorkerId(1), timeout_s=60.0)

    def hang_after(self, seconds: float, pid: int = os.getpid()) -> str:
        self.clock.now += seconds
        return self.detector.hang(pid)


def test_a_wait_after_long_loading_is_no_stall(tmp_path: Path, clock: SimpleNamespace, warnings: list[str]) -> None:
    server = worker(tmp_path, "server")
    reporter = StallReporter(server, tmp_path, after_s=60.0)
    clock.now += 76.0
    server.waits("4 groups", on=["dev1"])
    reporter.look(clock.now)
    assert warnings == []
    clock.now += 61.0
    reporter.look(clock.now)
    assert warnings == ["no progress for 61 s: waiting 61 s for 4 groups"]


@pytest.fixture
def watch(tmp_path: Path, clock: SimpleNamespace) -> Watch:
    return Watch(tmp_path, clock)


def test_a_worker_with_a_job_that_does_not_move_is_hung(tmp_path: Path, watch: Watch) -> None:
    assert not watch.hang_after(1000), "it has not even begun: it may be loading a large model"
    process = worker(tmp_path)
    assert not watch.hang_after(1000), "it has no job: idle"
    process.has_jobs([1], GENERATING)
    assert not watch.hang_after(59)
    process.progress()
    assert not watch.hang_after(59)
    process.waits("a version of the weights")
    assert not watch.hang_after(59), "slow, and not hung"
    assert watch.hang_after(61) == "no progress for 60 s; it was waiting 2 min for a version of the weights"
    process.no_longer_has(1, failed=True)
    process.flush()
    assert not watch.hang_after(61), "its job is gone"
    assert not watch.hang_after(61)


def test_the_clock_of_a_job_starts_with_it_however_long_the_worker_was_silent(tmp_path: Path, watch: Watch) -> None:
    process = worker(tmp_path)
    assert not watch.hang_after(1190)
    process.has_jobs([1], GENERATING)
    assert not watch.hang_after(10)
    assert watch.hang_after(51)


def test_what_an_earlier_worker_of_the_same_name_has_left_is_no_hang(tmp_path: Path, watch: Watch) -> None:
    worker(tmp_path).has_jobs([1], GENERATING)
    assert not watch.hang_after(0)
    assert not watch.hang_after(1000, pid=os.getpid() + 1), "the new one has not said anything yet"
    assert watch.hang_after(0), "the one that has said it"


def test_a_tool_that_keeps_the_interpreter_ends_its_worker_and_is_named(tmp_path: Path, clock: SimpleNamespace) -> None:
    process = worker(tmp_path)
    detector = HangDetector(tmp_path, WorkerId(1), timeout_s=600.0, tool_timeout_s=30.0)
    clock.now += 5.0
    process.calls_tool(1, "look_up")
    process.calls_tool(2, "matches")
    assert detector.hang(os.getpid()) == ""
    clock.now += 40.0
    process.has_called_tool(1)
    process.flush()
    clock.now += 40.0
    assert detector.hang(os.getpid()) == "", "40 s after a thread ran: it may compile"
    clock.now += 1.0
    reason = detector.hang(os.getpid())
    assert reason.startswith("for 41 s a tool call has kept its interpreter")
    assert "--tool-timeout). Running: matches." in reason
    process.flush()
    assert detector.hang(os.getpid()) == "", "other threads run: the worker gives it up itself"
    process.has_called_tool(2)
    process.flush()
    clock.now += 100.0
    assert detector.hang(os.getpid()) == "", "no call, no job"


CHILD = """
import re, sys
from pathlib import Path
from async_grpo.telemetry.activity import WAITING, activity
from async_grpo.telemetry.stalls import StallReporter
activity.publish(Path(sys.argv[1]), "dev1", device="cpu", run_id="r", state=WAITING, stall_after_s=60)
StallReporter(activity, Path(sys.argv[1]), after_s=1.0).start()
activity.calls_tool(0, "matches")
re.match("(a+)+$", "a" * 64 + "b")
"""


def test_a_regular_expression_that_backtracks_is_seen_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "TOOL_GRACE_S", 0.5)
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])
    try:
        detector = HangDetector(tmp_path, WorkerId(1), timeout_s=600.0, tool_timeout_s=0.5)
        reason = wait_until(lambda: detector.hang(child.pid) or None, what="the hang", timeout_s=60, poll_s=0.05)
        assert "Running: matches." in reason
    finally:
        child.kill()
        child.wait()


def test_another_worker_s_job_is_no_sign_of_life_or_death(tmp_path: Path, watch: Watch) -> None:
    worker(tmp_path, "dev11").has_jobs([1], GENERATING)
    assert not watch.hang_after(1000)


def test_a_restarted_worker_goes_on_counting(tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        process = worker(tmp_path)
        counts.append(read_count(activity_file(tmp_path, "dev1")))
        process.progress()
        counts.append(read_count(activity_file(tmp_path, "dev1")))
    assert counts[1] == counts[2], "starting is no progress"
    assert len(set(counts)) == 3


# --- What a process says of itself -------------------------------------------------------------------------------


def seen(root: Path) -> ActivityRecord:
    return read_activity(activity_file(root, "dev1"))


def test_a_change_of_state_and_a_new_job_are_seen_at_once_and_the_rest_with_them(
    tmp_path: Path, clock: SimpleNamespace
) -> None:
    writer = worker(tmp_path)
    assert (seen(tmp_path).name, seen(tmp_path).pid, seen(tmp_path).state) == ("dev1", os.getpid(), LOADING)
    clock.now += 5
    writer.has_jobs([7, 8], GENERATING)
    assert [job.seq for job in seen(tmp_path).jobs] == [7, 8]
    writer.doing(GENERATING, version=3)
    clock.now += 2
    writer.has_jobs([7], SCORING)
    assert [job.phase for job in seen(tmp_path).jobs] == [GENERATING, GENERATING]
    writer.no_longer_has(8, done=True)
    writer.doing(SCORING)
    record = seen(tmp_path)
    assert [(job.seq, job.phase, job.since_s) for job in record.jobs] == [(7, SCORING, 1007.0)]
    assert (record.version, record.jobs_done, record.progress_s) == (3, 1, 1007.0)
    assert record.spent_s == {LOADING: 5.0, GENERATING: 2.0}
    assert record.spent(1008.0)[SCORING] == 1.0


def test_shares_are_those_of_the_last_minute(tmp_path: Path, clock: SimpleNamespace) -> None:
    writer = worker(tmp_path)
    assert seen(tmp_path).share_of_last_minute([LOADING], clock.now) is None, "it has only just begun"
    for _ in range(60):  # ten minutes of work
        writer.doing(GENERATING)
        clock.now += 10
        writer.flush()
    writer.waits("jobs")
    for _ in range(3):
        clock.now += 10
        writer.flush()
    assert seen(tmp_path).share_of_last_minute([GENERATING], clock.now) == pytest.approx(0.5)
    assert seen(tmp_path).share_of_last_minute([WAITING], clock.now) == pytest.approx(0.5)


def test_files_are_private_and_a_damaged_or_foreign_one_says_nothing(tmp_path: Path) -> None:
    writer = worker(tmp_path)
    path = activity_file(tmp_path, "dev1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    whole = path.read_bytes()
    for broken in (b"", whole[:10], whole[:60], whole.replace(b'"cpu"', b'"gpu"')):
        path.write_bytes(broken)
        assert read_activity(path) is None
    path.unlink()
    assert read_activity(path) is None
    path.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(whole)
    assert read_activity(path) is None
    assert read_all(tmp_path) == {}
    path.unlink()
    path.write_bytes(whole)
    worker(tmp_path, "server")
    path.with_name("noise.status").write_text("noise")
    assert read_all(tmp_path).keys() == {"dev1", "server"}
    assert read_all(tmp_path / "nowhere") == {}
    assert writer.state == LOADING


def test_what_a_killed_process_said_last_stays(tmp_path: Path) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from async_grpo.telemetry.activity import activity
        activity.publish(Path({str(tmp_path)!r}), "dev1", device="cpu", run_id="run", state="loading", stall_after_s=60)
        activity.doing("generating", version=4)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert (seen(tmp_path).state, seen(tmp_path).version) == (GENERATING, 4)


def test_a_very_long_text_does_not_break_the_record(tmp_path: Path) -> None:
    worker(tmp_path).waits("x" * 20_000)
    assert (seen(tmp_path).state, seen(tmp_path).waits_for) == (WAITING, "")


# --- waits feed it


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Activity:
    writer = worker(tmp_path, state=TRAINING)
    monkeypatch.setattr(waiting, "activity", writer)
    monkeypatch.setattr(waiting, "NAME_EVERY_S", 0.0)
    return writer


def test_whoever_waits_is_named_there_and_goes_on_with_what_it_did(tmp_path: Path, here: Activity) -> None:
    states = []

    def ready() -> str | None:
        states.append((seen(tmp_path).state, seen(tmp_path).waits_for, seen(tmp_path).waits_on))
        return "it" if len(states) == 2 else None

    wait_until(ready, what="the weights", on=["server"], timeout_s=60, poll_s=0)
    assert states == [(TRAINING, "", ()), (WAITING, "the weights", ("server",))]
    assert (seen(tmp_path).state, seen(tmp_path).waits_for) == (TRAINING, "")


def test_a_wait_that_ends_with_an_error_has_ended(tmp_path: Path, here: Activity) -> None:
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        wait_until(lambda: None, what="x", timeout_s=60, poll_s=0, check_peer=fail)
    with pytest.raises(KeyError), Reminder(lambda: "x") as reminder:
        reminder.tick()
        raise KeyError
    assert seen(tmp_path).state == TRAINING


def test_durations() -> None:
    texts = {-1: "0.0 s", 0.44: "0.4 s", 9.97: "10 s", 119.4: "119 s", 150: "2 min"}
    texts |= {7100: "118 min", 12000: "3 h 20 min", 190000: "2 d 4 h"}
    assert {seconds: for_people(seconds) for seconds in texts} == texts
