"""Threads that are kept for the next task, and rewards and tools that use signals, which run in the main thread."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from textwrap import dedent
from typing import Any

import pytest

from async_grpo.errors import PeerDiedError
from async_grpo.rollout import threads as threads_module
from async_grpo.rollout.threads import KeptThreads, UserCode, asks_for_main_thread, main_thread
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


# --- Rewards and tools that use signals run in the main thread, and the worker's loop beside it ------------------


def in_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def with_alarm() -> str:
    """As math-verify's time-out does."""
    previous = signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.signal(signal.SIGALRM, previous)
    return "scores"


def with_alarm_swallowed() -> str:
    try:
        return with_alarm()
    except ValueError:
        return "no scores"


def beside(*functions: Callable[[], Any], code: UserCode) -> list[Any]:
    """Each function called by the worker's loop in a thread, as `code`; their results, or what they raised."""
    results: list[Any] = []

    def work() -> None:
        assert not in_main()
        with ThreadPoolExecutor(1) as threads:
            for function in functions:
                future = threads.submit(code.call, function)
                results.append(future.exception(DEADLINE_S) or future.result())

    main_thread.serve_while(work)
    return results


@pytest.mark.parametrize("function", [with_alarm, with_alarm_swallowed])
def test_code_that_uses_signals_moves_to_the_main_thread(function: Callable[[], str]) -> None:
    assert beside(function, in_main, code=UserCode("rewards")) == ["scores", True]


def test_other_code_stays_where_it_is() -> None:
    def fails() -> None:
        raise RuntimeError("no reward")

    first, *others = beside(fails, in_main, code=UserCode("rewards"))
    assert str(first) == "no reward"
    assert others == [False]
    assert beside(in_main, code=UserCode("rewards", in_main=True)) == [True]


def test_what_it_raises_in_the_main_thread_is_the_callers() -> None:
    def exits() -> None:
        with_alarm()
        raise SystemExit("no licence")

    first, *others = beside(exits, with_alarm, code=UserCode("rewards"))
    assert isinstance(first, SystemExit)
    assert others == ["scores"]


def test_without_a_loop_beside_it_the_main_thread_calls_itself() -> None:
    assert UserCode("rewards").call(with_alarm) == "scores"
    with ThreadPoolExecutor(1) as threads, pytest.raises(PeerDiedError, match="The worker ends"):
        threads.submit(main_thread.run, in_main).result(DEADLINE_S)


def test_an_error_of_the_loop_is_raised_and_signals_are_as_before() -> None:
    import _signal

    original = _signal.signal

    def work() -> None:
        raise RuntimeError("the engine is broken")

    with pytest.raises(RuntimeError, match="the engine is broken"):
        main_thread.serve_while(work)
    assert _signal.signal is original


def test_the_thread_of_the_loop_has_ended_when_the_process_may() -> None:
    threads: list[threading.Thread] = []
    main_thread.serve_while(lambda: threads.append(threading.current_thread()))
    assert not threads[0].is_alive()


HANGS = """
import threading, time
from async_grpo.rollout import threads as module

def work():
    threading.Thread(target=module.main_thread.run, args=(lambda: time.sleep(1000),), daemon=True).start()
    started.wait()
    {then}

started = threading.Event()
sleep, time.sleep = time.sleep, lambda seconds: (started.set(), sleep(seconds))
module.ENDING_S = 0.05
module.main_thread.serve_while(work)
"""


@pytest.mark.parametrize(
    ("then", "code", "said"), [("pass", 0, "the worker ends before"), ("raise RuntimeError('broken')", 1, "broken")]
)
def test_a_call_that_hangs_does_not_keep_the_process_from_ending(then: str, code: int, said: str) -> None:
    program = [sys.executable, "-c", HANGS.format(then=then)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr


def test_rewards_of_trl_that_look_at_their_thread_are_known_before_they_are_called() -> None:
    from trl import rewards
    from trl.rewards import accuracy_reward, reasoning_accuracy_reward, think_format_reward

    assert asks_for_main_thread(accuracy_reward)
    assert asks_for_main_thread(functools.partial(reasoning_accuracy_reward))
    assert not asks_for_main_thread(think_format_reward)
    assert not asks_for_main_thread(with_alarm), "it is moved with its first call"
    looking = [path.stem for path in Path(rewards.__path__[0]).glob("*.py") if "main_thread" in path.read_text()]
    assert looking == ["accuracy_rewards"], "a later TRL has others"
