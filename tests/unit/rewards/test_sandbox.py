"""What a hostile program can do in the sandbox, and that nothing runs where there is none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from isolated_sandbox import isolated

from async_grpo.rewards.sandbox import SWITCH, Limits, SandboxError, SandboxResult, run, run_code
from kit.scripts import module_at
from kit.waiting import until

ROOT = Path(__file__).resolve().parents[3]
SHORT = Limits(wall_s=2.0, cpu_s=1, memory_bytes=192 << 20)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


@isolated
def test_a_program_gets_its_input_and_its_output_comes_back() -> None:
    result = run_code("import sys\nprint(input() + '!')\nprint('bad', file=sys.stderr)\nsys.exit(3)", stdin="hello\n")
    assert (result.outcome, result.exit_code, result.ok) == ("exited", 3, False)
    assert (result.stdout, result.stderr) == ("hello!\n", "bad\n")
    assert run_code("").ok


def test_a_sandbox_that_is_slow_to_start_is_not_said_to_be_impossible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bubblewrap(tmp_path, monkeypatch, '[ "$1" = --help ] && echo --size && exit\nexec /bin/sleep 1000')
    monkeypatch.setattr(run, "_START_S", 0.05)
    with pytest.raises(SandboxError, match=r"was not ready after .* too busy") as error:
        run_code("pass")
    assert "cannot be isolated" not in str(error.value)


def test_a_program_that_ended_in_time_has_not_timed_out_because_its_end_was_seen_late() -> None:
    """The worker was stopped meanwhile, or the machine slept."""
    told, ready = os.pipe()
    process = subprocess.Popen(["echo", "done"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    os.write(ready, b"ready")
    os.close(ready)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with os.fdopen(told, "rb") as status:
        result = run._watch(process, status, Limits(wall_s=1e-9))
    assert (result.outcome, result.exit_code, result.stdout) == ("exited", 0, "done\n")


@isolated
def test_a_traceback_names_the_line() -> None:
    result = run_code("x = 1\nraise ValueError(x)")
    assert result.exit_code == 1
    assert "line 2, in <module>\nValueError: 1" in result.stderr.replace("    raise ValueError(x)\n", "")


@isolated
def test_large_source_and_input_are_no_deadlock() -> None:
    source = f"import sys\nprint(len(sys.stdin.read()))\n# {'x' * 1_000_000}"
    assert run_code(source, stdin="y" * 3_000_000).stdout == "3000000\n"


@isolated
def test_an_endless_loop_ends() -> None:
    result = run_code("while True: pass", limits=SHORT)
    assert (result.outcome, result.exit_code) in [("exited", 128 + signal.SIGKILL), ("timed out", -1)]
    assert result.wall_s < 5


@isolated
def test_closing_its_output_wins_no_time() -> None:
    result = run_code("import os, time; os.close(1); os.close(2); time.sleep(100)", limits=Limits(wall_s=0.5))
    assert result.outcome == "timed out"


@isolated
def test_a_memory_bomb_meets_its_limit() -> None:
    assert "MemoryError" in run_code("x = bytearray(1 << 30)", limits=replace(SHORT, wall_s=60.0)).stderr


@isolated
def test_a_flood_of_output_is_cut_and_ended() -> None:
    result = run_code("while True: print('x' * 1000)", limits=Limits(output_bytes=10_000))
    assert (result.outcome, len(result.stdout), result.exit_code) == ("too much output", 10_000, -1)


@isolated
def test_the_disk_cannot_be_filled() -> None:
    source = """
import os
written = 0
for name in range(100):
    try:
        with open(f"/program/{name}", "wb", buffering=0) as file:
            for _ in range(100):
                written += file.write(bytes(100_000))
    except OSError:
        pass
print(written)
"""
    result = run_code(source, limits=Limits(file_bytes=1_000_000))
    assert 500_000 < int(result.stdout) < 1_200_000, result


@isolated
def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = run_code(f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)")
    assert "OSError" in result.stderr
    assert "abstract" not in run_code("import socket; print(socket.if_nameindex())").stdout


@isolated
def test_a_fork_bomb_is_cheap() -> None:
    result = run_code("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", limits=SHORT)
    assert result.outcome in ("timed out", "exited")
    until(lambda: not _processes_in_sandboxes())


@isolated
def test_it_cannot_kill_what_started_it() -> None:
    source = """
import os, signal
for pid in (os.getppid(), 1, os.getpgid(0), -1, %d, %d):
    if pid not in (0, os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
print("still here")
"""
    result = run_code(source % (os.getpid(), os.getppid()))
    assert result.outcome == "exited"  # the test is still alive, too


@isolated
@pytest.mark.parametrize("path", [str(Path(__file__)), "/etc/passwd", "/proc/self/environ", "/root", "/home", "/sys"])
def test_files_outside_cannot_be_read(path: str) -> None:
    result = run_code(f"import os; print(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read())")
    if result.ok:  # a folder on the way to the interpreter may be there: then it holds nothing else
        assert sys.base_prefix.startswith(path)
        assert len(eval(result.stdout)) == 1
    else:
        assert "FileNotFoundError" in result.stderr or "PermissionError" in result.stderr


@isolated
def test_environment_and_open_files_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "token")
    with Path(__file__).open("rb") as file:
        os.set_inheritable(file.fileno(), True)
        source = """
import os
print(dict(os.environ), [fd for fd in range(3, 200) if os.path.exists(f"/dev/fd/{fd}") or not _closed(fd)])
"""
        closed = (
            "import os\ndef _closed(fd):\n    try: os.fstat(fd)\n    except OSError: return True\n    return False\n"
        )
        result = run_code(closed + source)
    assert result.stdout == "{'LC_CTYPE': 'C.UTF-8'} []\n", result


@isolated
def test_it_has_no_rights_and_gets_none() -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"tmpfs", b"/program", b"tmpfs", 0, None), libc.umount2(b"/usr", 2), libc.setns(0, 0))
print(libc.mount(None, b"/usr", None, 4096 | 32, None))
if libc.unshare(0x10000000 | 0x20000) == 0:  # a user namespace of its own: what it sees stays read-only there
    print(libc.umount2(b"/usr", 2), libc.mount(None, b"/usr", None, 4096 | 32, None))
try:
    os.setuid(0); open("/usr/file", "w")
except OSError as error:
    print(type(error).__name__)
"""
    result = run_code(source)
    assert set(result.stdout.replace("\n", " ").split()) <= {"-1", "PermissionError", "OSError"}, result


@isolated
def test_an_escaped_grandchild_ends_with_it() -> None:
    source = """
import ctypes, os, signal, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(1, 0)  # no signal when its parent dies
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.close(0); os.close(1); os.close(2)
        time.sleep(100)
    os._exit(0)
time.sleep(0.2)
"""
    assert run_code(source).ok
    until(lambda: not _processes_in_sandboxes())
    assert run_code(source + "time.sleep(100)", limits=Limits(wall_s=1.0)).outcome == "timed out"
    until(lambda: not _processes_in_sandboxes())


@isolated
def test_it_ends_when_the_worker_is_killed() -> None:
    source = "import os, time\nos.setsid()\ntime.sleep(100)"
    code = f"from async_grpo.rewards.sandbox import run_code, Limits; run_code({source!r}, limits=Limits(wall_s=90))"
    worker = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        until(lambda: bool(_processes_in_sandboxes()))
    finally:
        worker.kill()
        worker.wait()
    until(lambda: not _processes_in_sandboxes())


def test_it_is_off_until_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH)
    with pytest.raises(SandboxError, match=SWITCH):
        run_code("pass")


def bubblewrap(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str | None) -> None:
    """Put this in the place of bubblewrap; `None`: there is none."""
    if script is not None:
        (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(
    ("does", "reason"),
    [
        ("exit 1", "it did not start"),
        ("echo no namespaces for you >&2; exit 1", "no namespaces for you"),
        ('while [ "$1" != -- ]; do shift; done; shift; exec "$@"', "the namespaces were not made"),
        (None, "bubblewrap is not installed.*apt-get install bubblewrap"),
    ],
)
def test_without_isolation_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, does: str | None, reason: str
) -> None:
    """A kernel that forbids namespaces, as bubblewrap tells it; one that lies; and a machine without bubblewrap."""
    bubblewrap(tmp_path, monkeypatch, does and f'[ "$1" = --help ] && echo --size && exit\n{does}')
    with pytest.raises(SandboxError, match=f"was not run, because it cannot be isolated here: .*{reason}"):
        run_code(f"open({str(tmp_path / 'it ran')!r}, 'w')")
    assert not (tmp_path / "it ran").exists()


def test_a_bubblewrap_that_cannot_limit_the_size_of_a_directory_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bubblewrap(tmp_path, monkeypatch, "echo --tmpfs DEST")
    with pytest.raises(SandboxError, match=f"{tmp_path}/bwrap is too old"):
        run_code("pass")


@pytest.mark.parametrize("limit", [{"wall_s": 0}, {"cpu_s": -1}, {"wall_s": float("inf")}, {"processes": 0}])
def test_limits_must_limit(limit: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="nothing runs without limits"):
        Limits(**limit)  # type: ignore[arg-type]


def test_the_example_takes_one_bounded_number() -> None:
    none = ["NaN", "Infinity", "1e999", "true", "[42]", '"42"', "42 43", "", "1" * 33]
    numbers = {"42\n": 42.0, "4.2e1": 42.0, "-1": -1.0, **dict.fromkeys(none)}
    assert {text: _example().parse_number(text) for text in numbers} == numbers


@isolated
def test_the_example_reward() -> None:
    reward = _example().printed_the_answer
    right, wrong = "So:\n```python\nprint(40 + 2)\n```", [{"role": "assistant", "content": "```\nprint(1)\n```"}]
    assert reward(completions=[right, wrong, "42"], answer=["42", 42, 42]) == [1.0, 0.0, 0.0]


def _example() -> ModuleType:
    return module_at(ROOT / "examples" / "sandboxed_reward.py")


def _processes_in_sandboxes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if "/program/main.py" in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_results_tell_whether_all_is_well() -> None:
    result = SandboxResult(outcome="exited", exit_code=0, stdout="", stderr="", wall_s=0.1)
    assert (result.ok, replace(result, outcome="timed out").ok) == (True, False)
