"""What a user sees of prompt groups that fail, and which errors of an agent are a connection that broke."""

from __future__ import annotations

import http.client
import json
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from async_grpo.errors import BadGroupError
from async_grpo.rollout.endpoint.harness import is_lost_connection
from async_grpo.rollout.failures import Failures, summary

HERE = r"\(test_failures\.py:\d+\)"


def reward(prompt: str) -> None:
    raise RuntimeError(f"no reward for {prompt}")


def other_reward() -> None:
    raise RuntimeError("no licence\nfor this\n  judge")


def task_reward(text: str) -> Any:
    return json.loads(text)


def judge(text: str) -> Any:
    return json.loads(text)


def raised_by(work: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(Exception) as raised:
        work(*arguments)
    return "".join(traceback.format_exception(raised.value))


def test_a_reward_that_always_fails_is_one_warning_and_it_names_the_code_and_the_line_of_the_traceback(
    warnings: list[str], tmp_path: Path
) -> None:
    failures = Failures(tmp_path / "quarantine")
    for seq in range(20):
        for attempt in range(3):
            failures.add(seq, attempt, raised_by(reward, f"{seq}+1="))
    failures.add(20, 0, raised_by(other_reward))
    first, second = warnings
    assert re.match(rf"prompt group 0 failed \(attempt 1\): RuntimeError: no reward for 0\+1= {HERE}.", first)
    assert first.endswith(f"{tmp_path}/quarantine/*.reason")
    assert re.match(rf"prompt group 20 failed \(attempt 1\): RuntimeError: no licence {HERE}.", second)


def test_rewards_that_fail_in_the_same_library_are_told_apart_and_each_names_its_own_line(
    warnings: list[str], tmp_path: Path
) -> None:
    failures = Failures(tmp_path)
    for seq, work in enumerate([task_reward, judge, task_reward]):
        failures.add(seq, 0, raised_by(work, "no json"))
    assert len(warnings) == 2
    for said, work in zip(warnings, (task_reward, judge), strict=True):
        line = work.__code__.co_firstlineno + 1
        assert re.search(rf"JSONDecodeError: .* \(test_failures\.py:{line}, raised in decoder\.py:\d+\)", said)


def test_errors_that_one_line_of_ours_reports_are_told_apart_by_what_caused_them(
    warnings: list[str], tmp_path: Path
) -> None:
    def report(work: Callable[[], Any]) -> None:
        try:
            work()
        except (RuntimeError, ValueError) as error:
            raise BadGroupError(f"Group 3 cannot be written: {error}") from error

    failures = Failures(tmp_path)
    for seq, work in enumerate([other_reward, lambda: json.loads("no"), other_reward]):
        failures.add(seq, 0, raised_by(report, work))
    assert len(warnings) == 2
    assert "BadGroupError: Group 3 cannot be written: Expecting value" in warnings[1]


def test_errors_of_several_tasks_are_told_by_the_last_of_them() -> None:
    def several() -> None:
        raise ExceptionGroup("two judges", [_caught(other_reward), _caught(lambda: reward("1+1="))])

    what, where = summary(raised_by(several))
    assert (what, where[:16]) == ("RuntimeError: no reward for 1+1=", "test_failures.py")


def test_what_was_raised_is_found_wherever_the_traceback_says_it() -> None:
    def chained() -> None:
        try:
            other_reward()
        except RuntimeError as error:
            raise ValueError("x" * 999) from error

    what, where = summary(raised_by(chained))
    assert (what[:14], len(what), where[:17]) == ("ValueError: xx", 300, "test_failures.py:")
    assert summary(raised_by(compile, "x = (", "setup", "exec"))[0] == "SyntaxError: '(' was never closed"
    endless: Callable[..., Any] = lambda: endless()  # noqa: E731
    assert summary(raised_by(endless))[0].startswith("RecursionError: maximum recursion depth")
    assert summary("The job cannot be read.\n") == ("The job cannot be read.", "")


def _caught(work: Callable[[], None]) -> Exception:
    try:
        work()
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


# --- Which errors of an agent are a connection to the endpoint that broke, and which are its own -----------------

BASE = "http://127.0.0.1:4242/v1"


def raised_for(cause: BaseException, error: Exception) -> Exception:
    error.__cause__ = cause
    return error


def with_url(url: str, error: Exception) -> Exception:
    error.request = SimpleNamespace(url=url)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ConnectionResetError(), True),
        (http.client.RemoteDisconnected("closed"), True),
        (aiohttp.ServerDisconnectedError(), True),
        (raised_for(BrokenPipeError(), ValueError("no answer")), True),
        (ExceptionGroup("tasks", [ValueError(), ConnectionResetError()]), True),
        (raised_for(ConnectionResetError(), with_url(f"{BASE}/chat/completions", ValueError())), True),
        (raised_for(ConnectionResetError(), with_url("https://search.example/?q=a", ValueError())), False),
        (ValueError("of its own"), False),
        (TimeoutError("it hung up itself"), False),
    ],
)
def test_errors_of_connections(error: Exception, lost: bool) -> None:
    assert is_lost_connection(error, BASE) is lost


def test_the_errors_of_httpx_and_openai() -> None:
    httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
    for url, lost in ((f"{BASE}/chat/completions", True), ("https://search.example", False)):
        request = httpx.Request("POST", url)
        disconnected = httpx.RemoteProtocolError("Server disconnected", request=request)
        assert is_lost_connection(disconnected, BASE) is lost
        assert is_lost_connection(raised_for(disconnected, openai.APIConnectionError(request=request)), BASE) is lost
    assert is_lost_connection(httpx.RemoteProtocolError("Server disconnected"), BASE)
    assert not is_lost_connection(openai.APITimeoutError(httpx.Request("POST", BASE)), BASE)
