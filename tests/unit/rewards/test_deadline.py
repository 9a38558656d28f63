"""Rewards with a deadline: a slow or deadly completion costs itself only."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest

from async_grpo.rewards import with_deadline

LIMIT_S = 5.0


@with_deadline(seconds=LIMIT_S, late=-1.0)
def trouble(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    (completion,), (right,) = completions, answer
    if completion == "sleeps":
        time.sleep(1000)
    if completion == "dies":
        os._exit(3)
    if completion == "raises":
        raise KeyError("no such answer")
    if completion == "none":
        return [None]
    return [float(completion == right)]


def test_each_completion_has_its_own_columns_and_its_own_time() -> None:
    completions = ["a", "sleeps", "b", "dies", "none", "c"]
    columns = {"answer": ["a", "x", "x", "x", "x", "c"], "trainer_state": object(), "log_metric": lambda *_: None}
    assert trouble(completions, **columns) == [1.0, -1.0, 0.0, -1.0, None, 1.0]


def test_an_exception_of_the_function_is_the_callers() -> None:
    with pytest.raises(KeyError, match="no such answer"):
        trouble(["raises"], answer=["x"])
    assert trouble(["a"], answer=["a"]) == [1.0]


def test_it_may_be_called_in_any_thread_and_in_several_at_a_time() -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda number: trouble([number, "x"], answer=["1", "x"]), "0123"))
    assert found == [[0.0, 1.0], [1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]


def test_its_processes_hold_no_open_file_of_others() -> None:
    doubled = with_deadline(seconds=60.0)(lambda completions: [2.0 * completions[0]])
    reader, writer = os.pipe()
    assert doubled([1.0, 2.0]) == [2.0, 4.0]
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], 60.0)
    assert ready, "a fork holds the pipe open"
    assert os.read(reader, 1) == b""
    os.close(reader)


_WITH_GRPC = """
import os
from contextlib import suppress
import grpc
from async_grpo.rewards import with_deadline

channel = grpc.insecure_channel("127.0.0.1:1")
with suppress(grpc.RpcError):
    channel.unary_unary("/nobody/answers")(b"", timeout=0.2)  # its threads poll from now on

@with_deadline(seconds=60, late=-1.0)
def length(completions):
    if completions == ["dies"]:
        os._exit(1)
    return [float(len(completions[0]))]

for _ in range(4):
    assert length(["a", "bb", "dies"]) == [1.0, 2.0, -1.0]
os._exit(0)
"""


def test_grpc_in_the_process_costs_no_completion_its_reward() -> None:
    """It starts its threads again in a fork, and aborts where what they poll with is closed."""
    ended = subprocess.run([sys.executable, "-c", _WITH_GRPC], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_dies_before_it_is_asked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forks: list[int] = []
    fork = os.fork

    def every_other_dies() -> int:
        forks.append(fork())
        if forks[-1] == 0 and len(forks) % 2:
            os._exit(1)
        return forks[-1]

    monkeypatch.setattr(os, "fork", every_other_dies)
    assert with_deadline(seconds=60.0, late=-1.0)(lambda completions: [1.0])(["a", "b", "c"]) == [1.0, 1.0, 1.0]
    monkeypatch.setattr(os, "fork", lambda: fork() or os._exit(1))
    with pytest.raises(RuntimeError, match="5 processes in a row died"):
        with_deadline(seconds=60.0)(lambda completions: [1.0])(["a"])


def test_what_cannot_be_sent_is_an_error_and_the_next_call_is_answered() -> None:
    counted = with_deadline(seconds=60.0)(lambda completions: [float(len(completions))])
    with pytest.raises(Exception, match=r"pickle|local object"):
        counted([lambda: None])
    assert counted(["a"]) == [1.0]


def test_what_others_see_of_the_function_stays() -> None:
    assert trouble.__name__ == "trouble"


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_deadline_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be positive"):
        with_deadline(seconds=seconds)


_ENDLESS = """
import os, sys
from async_grpo.rewards import deadline, with_deadline

deadline.CALLER_S = 0.5

@with_deadline(seconds=0.5)
def endless(completions, **columns):
    os.write(1, b"%d\\n" % os.getpid())
    while True:
        pass

endless(["x"])
"""


def test_a_call_whose_caller_is_killed_ends_too() -> None:
    with subprocess.Popen([sys.executable, "-c", _ENDLESS], stdout=subprocess.PIPE, text=True) as caller:
        pid = int(caller.stdout.readline())
        caller.kill()
        with suppress(psutil.NoSuchProcess):
            child = psutil.Process(pid)
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.02)
            ended = child.status() == psutil.STATUS_ZOMBIE
            child.kill()
            assert ended, "a process that nobody waits for computes for ever"
