"""The archive for a bug report, of runs that are dead, odd or full of secrets. Live ones: tests/integration."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from async_grpo.checks.bug_report import dump
from async_grpo.checks.bug_report.stacks import listens, run_processes, stacks_of
from async_grpo.cli import main
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from kit.plans import planned
from kit.waiting import DEADLINE_S, until

SERVER = """
import sys, time
from pathlib import Path
from async_grpo.rundir.locks import server_lock
from async_grpo.setup.process import write_stacks_on_signal
from async_grpo.rundir.paths import RunDir

run = RunDir(Path(sys.argv[1]))
lock = server_lock(run.root)
assert lock.try_acquire({"role": "parameter server"})

def hangs_here():
    print("ready", flush=True)
    time.sleep(100_000)

if sys.argv[2] == "listens":
    write_stacks_on_signal(run.stacks("server"))
hangs_here()
"""
RANK = """
import re, sys, time
from pathlib import Path
from async_grpo.setup.process import write_stacks_on_signal

def waits_for_the_others():
    print("ready", flush=True)
    time.sleep(100_000)

def matches_for_ever():
    print("ready", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")  # in C, with the interpreter's lock

write_stacks_on_signal(Path(sys.argv[1]))
globals()[sys.argv[2]]()
"""


@contextmanager
def started(program: str, path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program, str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def texts(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        return {entry.name.partition("/")[2]: tar.extractfile(entry).read().decode() for entry in tar.getmembers()}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(dump, "_own_findings", lambda root: "checked\n")
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path / "worker", planned(Path("my_trainer.py")))
    return tmp_path / "worker"


def only_archive(folder: Path) -> Path:
    [archive] = folder.glob("async-grpo-dump-*.tar.gz")
    return archive


def test_secrets_of_the_environment_and_the_logs_are_not_in_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_notarealtokenbutsecret")
    monkeypatch.setenv("MY_DATABASE_PASSWORD", "open sesame")
    monkeypatch.setenv("UNLISTED", "private-but-unnamed")
    (root / "log_worker_1.txt").write_text(
        "loading\nHF_TOKEN=hf_notarealtokenbutsecret\nwandb login 0123456789abcdef0123456789abcdef01234567\n"
        "git clone https://me:letmein@host.example/x\nconnecting with open sesame\nthe last line\n"
    )
    (root / "queue").mkdir(mode=0o700)
    (root / "queue" / "0000000042.a00_pending.safetensors").write_text("a private prompt")
    (root / "quarantine").mkdir(mode=0o700)
    (root / "quarantine" / "0000000041.a02_failed.safetensors").write_text("a private prompt")
    (root / "quarantine" / "0000000041.a02_failed.reason").write_text("ValueError: a private prompt\n")
    assert main(["doctor", "--dump", str(root)]) == 0
    archive = only_archive(tmp_path)
    assert archive.stat().st_mode & 0o777 == 0o600
    found = texts(archive)
    everything = "\n".join(found.values())
    secrets = ["notarealtoken", "open sesame", "private-but-unnamed", "0123456789abcdef0", "letmein", "private prompt"]
    assert not [secret for secret in secrets if secret in everything]
    assert found["logs/log_worker_1.txt"].endswith("the last line\n")
    assert "queue/0000000042.a00_pending.safetensors  16 bytes" in found["queue.txt"]
    assert "torch==" in found["versions.txt"] and "No process holds a lock" in found["processes.txt"]
    assert json.loads(found["status.json"])["jobs_quarantined"] == 1
    assert found["doctor.txt"] == "checked\n" and '"run_id"' in found["run.json"]
    said = capsys.readouterr().out
    assert str(archive) in said and all(f"  {name}\n" in said for name in found)


def test_of_a_long_log_the_end_is_kept_and_what_is_no_file_is_not_waited_for(root: Path, tmp_path: Path) -> None:
    (root / "log_worker_1.txt").write_text("".join(f"line {number}\n" for number in range(50_000)))
    os.mkfifo(root / "log_worker_2.txt")
    (tmp_path / "elsewhere").write_text("not of this run")
    (root / "log_worker_3.txt").symlink_to(tmp_path / "elsewhere")
    (root / "metrics.jsonl").write_text('{"loss": 0.5}\n{"los')
    _, names = dump.write_dump(root, tmp_path)
    found = texts(only_archive(tmp_path))
    assert list(found) == names
    log = found["logs/log_worker_1.txt"]
    assert "bytes before this were left out" in log and log.endswith("line 49999\n") and "line 100\n" not in log
    assert "not a regular file" in found["logs/log_worker_2.txt"]
    assert "it is a link" in found["logs/log_worker_3.txt"]
    assert found["metrics.jsonl"].endswith('{"los')


@pytest.mark.parametrize(("make", "message"), [(False, "is not a directory"), (True, "is not a run directory")])
def test_what_is_no_run_is_refused(
    tmp_path: Path, make: bool, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if make:
        (tmp_path / "other").mkdir()
    assert main(["doctor", "--dump", str(tmp_path / "other")]) == 2
    assert message in capsys.readouterr().err


# --- stacks


def test_its_thread_for_stacks_is_asked_and_the_process_is_not_signalled(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of the process reads the frames of threads that run: a run was ended by a segmentation fault."""
    sent: list[int] = []
    monkeypatch.setattr("signal.pidfd_send_signal", lambda pidfd, number: sent.append(number))
    with started(SERVER, root, "listens") as process:
        [found] = run_processes(RunDir(root))
        assert found.pid == process.pid
        assert [RunDir(root).stacks("server").stat().st_mode & 0o777] == [0o600]
        assert "in hangs_here" in stacks_of(found, timeout_s=DEADLINE_S)
    assert set(sent) == {0}


def test_another_rank_of_the_server_is_known_by_its_open_file(root: Path) -> None:
    with started(RANK, RunDir(root).stacks("rank1"), "waits_for_the_others") as process:
        [found] = run_processes(RunDir(root))
        assert (found.name, found.pid) == ("rank1", process.pid)
        assert "in waits_for_the_others" in stacks_of(found, timeout_s=DEADLINE_S)
    assert list(run_processes(RunDir(root))) == []


def test_a_call_that_keeps_the_interpreters_lock_is_named_by_the_handler_of_c(root: Path) -> None:
    with started(RANK, RunDir(root).stacks("rank1"), "matches_for_ever") as process:
        [found] = run_processes(RunDir(root))
        assert "in matches_for_ever" in stacks_of(found, timeout_s=10)
        assert process.poll() is None


def test_a_stopped_server_is_not_waited_for_and_goes_on_later(root: Path) -> None:
    with started(SERVER, root, "listens") as process:
        process.send_signal(signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        [found] = run_processes(RunDir(root))
        text = stacks_of(found, timeout_s=0.3)
        assert "did not answer in 0.3 s" in text and "It is stopped" in text
        process.send_signal(signal.SIGCONT)
        until(lambda: "hangs_here" in found.stacks.read_text())
        assert process.poll() is None


def test_a_server_that_does_not_listen_yet_is_not_signalled(root: Path) -> None:
    with started(SERVER, root, "starts") as process:
        assert not listens(process.pid)
        [found] = run_processes(RunDir(root))
        assert "It was not signalled" in stacks_of(found, timeout_s=0.3)
        assert process.poll() is None


def test_a_process_that_no_longer_holds_the_lock_is_not_signalled(root: Path) -> None:
    with started(SERVER, root, "listens") as process:
        [found] = run_processes(RunDir(root))
        process.kill()
        process.wait()
        text = stacks_of(found, timeout_s=0.3)
    assert "ended just now" in text or "cannot be reached" in text
    assert list(run_processes(RunDir(root))) == []


def test_ctrl_c_leaves_no_half_archive(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(root: Path) -> str:
        assert list(tmp_path.glob("*.tar.gz")), "it is being written"
        raise KeyboardInterrupt

    monkeypatch.setattr(dump, "_own_findings", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dump.write_dump(root, tmp_path)
    assert not list(tmp_path.glob("*.tar.gz"))


def test_names_that_are_not_text_end_no_dump(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File names are bytes, and a terminal takes UTF-8."""
    (root / "queue").mkdir(exist_ok=True)
    for name in (b"log_\xff.txt", b"queue/\xfe\xff"):
        Path(os.fsdecode(os.fsencode(root) + b"/" + name)).write_text("x\n")
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, "utf-8"))
    assert main(["doctor", "--dump", str(root)]) == 0
    assert b"  logs/log_\\udcff.txt\n" in terminal.getvalue()
    assert "queue/??" in texts(only_archive(tmp_path))["queue.txt"]
