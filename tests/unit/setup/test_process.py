"""Signals, a parent's death and the log, each in a real child process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

from async_grpo.errors import RunDirError
from async_grpo.setup import process
from async_grpo.setup.process import own_compile_cache
from kit.waiting import DEADLINE_S, is_gone, until


@contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-u", "-c", dedent(code), *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def says(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout.readline() == line + "\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_a_process_starts_ends_it_at_once_and_in_order(number: signal.Signals) -> None:
    code = """
        import time
        from async_grpo.setup.process import StopRequest
        StopRequest().install()
        try:
            print("loading")
            while True:
                time.sleep(0.05)
        finally:
            print("cleaned up")
    """
    with child(code) as process:
        says(process, "loading")
        process.send_signal(number)
        says(process, "cleaned up")
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_once_it_is_deferred_only_sets_a_flag(number: signal.Signals) -> None:
    code = """
        import time
        from async_grpo.setup.process import StopRequest
        stop = StopRequest().install()
        assert not stop.requested
        stop.defer()
        print("working")
        while not stop.requested:
            time.sleep(0.05)
        print("stopped in good order")
        input()
        raise SystemExit(7)
    """
    with child(code) as process:
        says(process, "working")
        process.send_signal(number)
        process.send_signal(number)  # an impatient user
        says(process, "stopped in good order")
        process.communicate("both were sent\n", DEADLINE_S)
        assert process.returncode == 7


PARENT = """
    import subprocess, sys, os
    child = subprocess.Popen([sys.executable, "-u", "-c", sys.argv[1], str(os.getpid())], start_new_session=True)
    os.write(1, b"%d\\n" % child.pid)  # at once, as the child writes there as well
    child.wait()
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    grandchild = """
import sys, time
from pathlib import Path
from async_grpo.setup.process import StopRequest, end_with_parent
StopRequest().install()
end_with_parent(int(sys.argv[1]))
print("ready")
while True:
    time.sleep(0.05)
"""
    with child(PARENT, grandchild) as parent:
        lines = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        assert "ready" in lines
        pid = int((lines - {"ready"}).pop())
        parent.kill()
        until(lambda: is_gone(pid))


def test_a_child_whose_parent_died_before_it_could_ask_ends_too() -> None:
    code = """
        from async_grpo.setup.process import StopRequest, end_with_parent
        StopRequest().install()
        end_with_parent(999999999)
        print("not reached")
    """
    with child(code) as process:
        assert process.wait(DEADLINE_S) == 0
        assert process.stdout.read() == ""


def test_the_log_is_one_line_a_message_and_prints_go_through_it() -> None:
    code = """
        from async_grpo.log import logger
        from async_grpo.setup.process import log_prints, set_up_log
        set_up_log("INFO")
        logger.debug("not shown")
        logger.warning("beware")
        log_prints()
        print("accuracy", 0.5)
        print("half a ", end="")
        print("line {braces} <red>tags</red>")
        print()
    """
    with child(code) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert [line[9:] for line in errors.splitlines()] == [
        "WARNING beware",
        "INFO    accuracy 0.5",
        "INFO    half a line {braces} <red>tags</red>",
    ]


def test_what_ends_a_process_is_put_back_where_user_code_replaces_it() -> None:
    """Also where that code raises: the error is said on the standard error."""
    code = """
        import signal, sys
        from async_grpo.setup.process import StopRequest, ending_kept, set_up_log
        set_up_log("INFO")
        StopRequest().install()
        with ending_kept():
            sys.stderr, sys.excepthook = None, lambda *_: None
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyError("said")
    """
    with child(code) as process:
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert " WARNING the setup file replaces sys.stderr, sys.excepthook, SIGINT in this process" in errors
    assert errors.endswith("KeyError: 'said'\n")


def test_each_process_has_its_own_compile_cache() -> None:
    env: dict[str, str] = {}
    own_compile_cache("dev1", env)
    assert env == {"UNSLOTH_COMPILE_LOCATION": str(Path("unsloth_compiled_cache") / "dev1")}
    env = {"UNSLOTH_COMPILE_LOCATION": "caches/mine"}
    own_compile_cache("parameter_server", env)
    assert env == {"UNSLOTH_COMPILE_LOCATION": str(Path("caches/mine") / "parameter_server")}


def test_no_child_imports_what_lies_in_the_working_directory() -> None:
    """Another user may have put a `trl.py` there: `python -m` looks there first, `python -Pm` never."""
    modules = Path(process.__file__).parents[2].rglob("*.py")
    assert [path for path in modules if re.search(r'sys\.executable,\s+"-m"', path.read_text())] == []


def test_a_compile_cache_through_a_link_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is another user's, by the same function."""
    monkeypatch.setattr(process, "find_spec", lambda name: name)
    (tmp_path / "dev1").symlink_to("elsewhere")
    with pytest.raises(RunDirError, match="dev1 is not a directory"):
        own_compile_cache("dev1", {"UNSLOTH_COMPILE_LOCATION": str(tmp_path)})


def test_a_stop_that_python_dropped_in_a_finaliser_comes_again() -> None:
    code = """
        import os, signal, time
        from async_grpo.setup import process

        class Last:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                for _ in range(1000):
                    pass

        process.SIGNAL_AGAIN_S = 2.0
        stop = process.StopRequest()
        stop.install()
        stop.install()  # as after a library that has put its own handler there
        last = Last()
        del last
        print("dropped", flush=True)
        time.sleep(60)
        raise AssertionError
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "dropped\n"), done.stderr


FREES = """
import ctypes, os, resource, sys
from async_grpo.setup.process import keep_freed_memory

libc, block = ctypes.CDLL(None), ctypes.c_void_p()

def fill():
    # What torch's allocator on a CPU does for a tensor of 40 MB.
    assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(40_000_000)) == 0
    ctypes.memset(block, 0, 40_000_000)
    libc.free(block)

if sys.argv[1] == "keep":
    keep_freed_memory(os.environ)
for _ in range(40):  # until the heap has a free block that fits
    fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(*arguments: str, **environment: str) -> int:
    """The page faults of allocating 4 blocks of 40 MB, one after the other: up to 10,000 pages each."""
    command = [sys.executable, "-c", FREES, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return int(result.stdout)


def test_freed_memory_is_kept_and_not_cleared_by_the_kernel_again_and_again() -> None:
    assert page_faults("keep") < 1000
    assert page_faults("default") > 5000, "else there is nothing to win any more"


def test_the_users_own_settings_of_malloc_are_left_alone() -> None:
    assert page_faults("keep", MALLOC_MMAP_THRESHOLD_="100000") > 5000


def test_loading_is_not_interrupted_by_the_collector_which_spares_what_was_loaded() -> None:
    code = """
        import gc, weakref
        from async_grpo.setup.process import gc_paused

        class Node:  # refers to itself, so that only the collector can free it
            def __init__(self):
                self.me = self

        frozen = gc.get_freeze_count()  # Python 3.12 has some itself
        try:
            with gc_paused():
                raise ValueError("no trainer")
        except ValueError:
            assert gc.isenabled() and gc.get_freeze_count() == frozen, "after a failed load all is as before"
        with gc_paused():
            assert not gc.isenabled()
            dropped, kept = weakref.ref(Node()), Node()
            assert dropped() is not None
        assert gc.isenabled()
        assert dropped() is None, "garbage of loading would stay for good"
        assert not any(thing is kept for thing in gc.get_objects()), "the collector still scans what was loaded"
        print("done")
    """
    with child(code) as process:
        says(process, "done")
