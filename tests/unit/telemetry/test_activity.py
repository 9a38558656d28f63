"""What a process says of itself."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from telemetry_fakes import set_clock, worker

from async_grpo.formatting import for_people
from async_grpo.rundir.paths import activity_file
from async_grpo.telemetry import activity as activity_module
from async_grpo.telemetry import waiting
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
)
from async_grpo.telemetry.waiting import Reminder, wait_until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return set_clock(monkeypatch, activity_module)


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
        activity.publish(Path({str(tmp_path)!r}), "dev1", device="cpu", run_id="run", state="loading")
        activity.doing("generating", version=4)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False, timeout=60)
    assert (seen(tmp_path).state, seen(tmp_path).version) == (GENERATING, 4)


def test_a_very_long_text_does_not_break_the_record(tmp_path: Path) -> None:
    writer = worker(tmp_path)
    writer.waits("x" * 20_000)
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
