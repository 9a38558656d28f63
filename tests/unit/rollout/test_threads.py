"""Threads that are kept for the next task."""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from textwrap import dedent

import pytest

from async_grpo.rollout import threads as threads_module
from async_grpo.rollout.threads import KeptThreads
from kit.waiting import DEADLINE_S, until


def note_thread(seen: SimpleQueue[tuple[int, str]]) -> Callable[[], None]:
    return lambda: seen.put((threading.get_ident(), threading.current_thread().name))


def test_one_thread_serves_one_task_after_the_other() -> None:
    threads, seen = KeptThreads(), SimpleQueue[tuple[int, str]]()
    found = set()
    for number in range(20):
        threads.run(note_thread(seen), name=f"task {number}")
        thread, name = seen.get(timeout=DEADLINE_S)
        assert name == f"task {number}"
        found.add(thread)
        until(lambda: threads._free._value == 1)
    assert len(found) == 1


def test_tasks_that_wait_for_each_other_all_run_at_once() -> None:
    threads, together = KeptThreads(), threading.Barrier(12 + 1)
    for _ in range(3):  # in new threads, and then in kept ones
        for _ in range(12):
            threads.run(lambda: together.wait(DEADLINE_S), name="waits")
        together.wait(DEADLINE_S)


def test_a_thread_that_had_nothing_to_do_ends_and_another_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads_module, "KEEP_S", 0.01)
    threads, seen = KeptThreads(), SimpleQueue[tuple[int, str]]()
    for _ in range(3):
        threads.run(note_thread(seen), name="task")
        thread, _ = seen.get(timeout=DEADLINE_S)
        until(lambda thread=thread: all(one.ident != thread for one in threading.enumerate()))


def test_a_task_that_raises_takes_only_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    threads, seen = KeptThreads(), SimpleQueue[tuple[int, str]]()

    def fails() -> None:
        raise ValueError

    threads.run(fails, name="fails")
    threads.run(note_thread(seen), name="goes on")
    assert seen.get(timeout=DEADLINE_S)[1] == "goes on"


def test_a_task_whose_thread_cannot_be_started_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threads, seen = KeptThreads(), SimpleQueue[tuple[int, str]]()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuses)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.run(note_thread(seen), name="refused")
    threads.run(note_thread(seen), name="started")
    assert seen.get(timeout=DEADLINE_S)[1] == "started"
    assert "refused" not in threads_module.wait_for_tasks(0.01)


def test_waiting_for_tasks_names_those_that_are_not_done() -> None:
    """Other tests may have left tasks of their own."""
    threads, go_on = KeptThreads(), threading.Event()
    threads.run(lambda: go_on.wait(DEADLINE_S), name="slow")
    assert "slow" in threads_module.wait_for_tasks(0.01)
    go_on.set()
    until(lambda: "slow" not in threads_module.wait_for_tasks(0.01))


def test_a_task_that_is_done_holds_nothing() -> None:
    """Tensors that its thread lets go of while the process ends abort the process."""

    class Held:
        def __del__(self) -> None:
            time.sleep(0.1)
            let_go.set()

    let_go = threading.Event()
    KeptThreads().run(functools.partial(id, Held()), name="holds")
    until(lambda: "holds" not in threads_module.wait_for_tasks(0.01))
    assert let_go.is_set()


def test_a_process_that_waits_for_its_tasks_ends_well() -> None:
    """Python ends a thread that comes back from torch to a process that is ending by aborting the process."""
    code = """
        import time, torch
        from async_grpo.rollout.threads import KeptThreads, wait_for_tasks
        began = []
        def task():
            a, until = torch.ones(400, 400), time.monotonic() + 0.5
            while time.monotonic() < until:
                a @ a
                began.append(1)
        KeptThreads().run(task, "multiplies")
        while not began:
            time.sleep(0.001)
        assert wait_for_tasks(60) == []
    """
    command = [sys.executable, "-c", dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
