"""What the sandbox holds for root and for an ordinary user, and that sandboxes do not get in each other's way.

The users: this one, and, where this one is root, an ordinary one.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from async_grpo.rewards.sandbox import SWITCH, Limits, SandboxError, run_code
from async_grpo.rewards.sandbox.seccomp import filter_program, forbidden

SRC = Path(__file__).resolve().parents[3] / "src"
SYSTEM_PYTHON = Path("/usr/bin/python3")  # one that an ordinary user can reach, wherever this environment lies
WORKERS: list[subprocess.Popen[str]] = []

# What an ordinary user's worker does, one request a line. Imports first: that user may not reach the checkout.
AS_USER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from concurrent.futures.thread import ThreadPoolExecutor
from dataclasses import asdict
from async_grpo.rewards.sandbox import Limits, SandboxError, run_code
os.setgroups([])
os.setresgid(12345, 12345, 12345)
os.setresuid(12345, 12345, 12345)
def run(given):
    try:
        return asdict(run_code(given["source"], limits=Limits(**given["limits"])))
    except SandboxError as error:
        return {"error": str(error)}
for line in sys.stdin:
    given = json.loads(line)
    with ThreadPoolExecutor(given["at_once"]) as pool:
        print(json.dumps(list(pool.map(run, [given] * given["at_once"]))), flush=True)
"""


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")


@pytest.fixture(params=["own", "ordinary"])
def user(request: pytest.FixtureRequest) -> str:
    return request.param


def run(user: str, source: str, *, at_once: int = 1, **limits: Any) -> list[dict[str, Any]]:
    """The results of a program that is run `at_once` times at the same time; skips where nothing can be isolated."""
    if why_not := _why_not(user):
        pytest.skip(why_not)
    return _ask(user, {"source": source, "at_once": at_once, "limits": limits})


@functools.cache
def _why_not(user: str) -> str:
    """Why this machine cannot isolate a program for this user; empty if it can."""
    version = [SYSTEM_PYTHON, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if user != "own" and (
        os.geteuid() != 0 or not SYSTEM_PYTHON.exists() or subprocess.check_output(version) != b"True\n"
    ):
        return "needs root and a Python of the system, 3.11 or newer"
    return str(_ask(user, {"source": "", "at_once": 1, "limits": {}})[0].get("error", ""))


def _ask(user: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    if user == "own":
        with ThreadPoolExecutor(given["at_once"]) as pool:
            return list(pool.map(_run_here, [given] * given["at_once"]))
    worker = _worker()
    worker.stdin.write(json.dumps(given) + "\n")
    worker.stdin.flush()
    return list(json.loads(worker.stdout.readline()))


def _run_here(given: dict[str, Any]) -> dict[str, Any]:
    try:
        return asdict(run_code(given["source"], limits=Limits(**given["limits"])))
    except SandboxError as error:
        return {"error": str(error)}


@functools.cache
def _worker() -> subprocess.Popen[str]:
    """One for all tests; it ends with its standard input."""
    command = [SYSTEM_PYTHON, "-B", "-c", AS_USER, str(SRC)]
    environment = {SWITCH: "1", "PATH": os.environ["PATH"]}
    WORKERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment))
    return WORKERS[-1]


@pytest.fixture(scope="module", autouse=True)
def _no_worker_is_left() -> Iterator[None]:
    yield
    for worker in WORKERS:
        worker.communicate(timeout=60)


@pytest.fixture(scope="module", autouse=True)
def secret() -> int:
    """The number of a key in a new session keyring of this process, and of what it starts; 0 if there are no keys."""
    libc, calls = ctypes.CDLL(None), forbidden(platform.machine())
    if libc.syscall(calls["keyctl"], 1, None) < 0:
        return 0
    number = int(libc.syscall(calls["add_key"], b"user", b"async-grpo-test", b"swordfish", 9, -3))
    assert number > 0
    libc.syscall(calls["keyctl"], 5, number, 0x3F3F3F3F)  # anybody may read it: the filter alone is in the way
    return number


def test_honest_programs_beside_each_other_are_all_right(user: str) -> None:
    """Each has its own count of processes and threads."""
    source = """
        import threading, time
        def work(n):
            time.sleep(0.5)
            results.append(n * n)
        results = []
        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(sum(results))
    """
    results = run(user, textwrap.dedent(source), at_once=4)
    assert [result["stdout"] for result in results] == ["5\n"] * 4, results


def test_it_has_as_many_processes_as_it_was_given(user: str) -> None:
    source = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(9)
        children += 1
except OSError:
    print(1 + children)
"""
    assert run(user, source, processes=4)[0]["stdout"] == "4\n"


def test_keys_of_the_session_stay_outside(user: str, secret: int) -> None:
    if not secret:
        pytest.skip("no keys here")
    source = f"""
import ctypes
libc, found = ctypes.CDLL(None), ctypes.create_string_buffer(64)
for number in ({secret}, -3, -4, -5):
    libc.syscall({forbidden(platform.machine())["keyctl"]}, 11, number, found, 64)
libc.syscall({forbidden(platform.machine())["request_key"]}, b"user", b"async-grpo-test", None, -3)
print(found.raw.strip(b"\\0"))
"""
    assert run(user, source)[0]["stdout"] == "b''\n"


def test_system_calls_that_it_does_not_need_are_refused(user: str) -> None:
    source = f"""
import ctypes, errno, json, socket
libc = ctypes.CDLL(None, use_errno=True)
def attempt(call):
    ctypes.set_errno(0)
    return errno.errorcode.get(ctypes.get_errno(), "done") if libc.syscall(call, 0, 0, 0, 0, 0, 0) < 0 else "done"
found = {{name: attempt(number) for name, number in {forbidden(platform.machine())}.items()}}
for family in ("AF_VSOCK", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_ALG"):
    try:
        socket.socket(getattr(socket, family)).close()
        found[family] = "done"
    except OSError as error:
        found[family] = errno.errorcode[error.errno]
found["clone3"], found["new"] = attempt(435), attempt(451)
for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
    found[f"clone {{flag:x}}"] = "EPERM" if libc.syscall({56 if platform.machine() == "x86_64" else 220}, flag | 17,
                                                         0, 0, 0, 0) < 0 else "done"
print(json.dumps(found))
"""
    found = json.loads(run(user, source)[0]["stdout"])
    right = dict.fromkeys(found, "EPERM") | {"clone3": "ENOSYS", "new": "ENOSYS"}
    assert found == right | {name: "EAFNOSUPPORT" for name in found if name.startswith("AF_")}


def test_what_an_ordinary_program_uses_works(user: str) -> None:
    source = """
import asyncio, concurrent.futures, mmap, os, random, socket, subprocess, sys, tempfile, threading, time
async def main():
    await asyncio.sleep(0)
    return 1
assert asyncio.run(main()) == 1
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert list(pool.map(abs, [-1, -2])) == [1, 2]
assert subprocess.run([sys.executable, "-I", "-S", "-c", "print(6)"], capture_output=True).stdout == b"6\\n"
with tempfile.TemporaryFile(dir="/program") as file:
    file.write(b"x")
one, other = socket.socketpair()
one.send(b"x")
assert other.recv(1) == b"x" and len(mmap.mmap(-1, 4096)) == 4096 and random.random() < 1
print("fine")
"""
    assert run(user, source)[0]["stdout"] == "fine\n"


def test_nothing_but_its_directory_can_be_written(user: str) -> None:
    source = """
import os
written = []
for folder in ("/", "/usr", "/usr/lib", "/tmp", "/dev", "/dev/shm", "/etc", "/program"):
    try:
        open(folder + "/file", "w").close()
        written.append(folder)
    except OSError:
        pass
print(written)
"""
    assert run(user, source)[0]["stdout"] == "['/program']\n"


def test_a_large_program_runs_and_its_size_is_no_file_of_its_own(user: str) -> None:
    result = run(user, f"# {'x' * 9_000_000}\nopen('/program/file', 'wb').write(bytes(900_000))\nprint('fine')")[0]
    assert (result["stdout"], result["stderr"]) == ("fine\n", "")


@pytest.mark.parametrize("umask", [0o077, 0o777])
def test_the_umask_of_the_worker_does_not_matter(umask: int) -> None:
    before = os.umask(umask)
    try:
        result = run("own", "open('/program/file', 'w').close(); print(open('/program/file').read() == '')")[0]
    finally:
        os.umask(before)
    assert result["stdout"] == "True\n", result


def test_where_namespaces_are_forbidden_nothing_runs(tmp_path: Path) -> None:
    """As in a container with default settings: its filter of system calls refuses namespaces, for root too."""
    code = f"""
import ctypes
from async_grpo.rewards.sandbox import run_code
libc, steps = ctypes.CDLL(None), {filter_program(platform.machine())!r}
class Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))
run = __import__("subprocess").run(["true"])
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(len(steps) // 8, steps)), 0, 0) == 0
import os
os.memfd_create = lambda *_: os.open({str(tmp_path / "input")!r}, os.O_RDWR | os.O_CREAT)
run_code("open({str(tmp_path / "it ran")!r}, 'w')")
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert "SandboxError: Code written by a model was not run, because it cannot be isolated here" in ran.stderr
    assert not (tmp_path / "it ran").exists()


def test_a_machine_without_a_list_of_calls_is_named() -> None:
    with pytest.raises(ValueError, match="no list of system calls for riscv64, only for x86_64, aarch64"):
        filter_program("riscv64")
