"""What a user sees of prompt groups that fail."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.rollout.failures import Failures, summary

HERE = r"\(test_failures\.py:\d+\)"


def reward(prompt: str) -> None:
    raise RuntimeError(f"no reward for {prompt}")


def other_reward() -> None:
    raise RuntimeError("no licence\nfor this\n  judge")


def raised_by(work: Callable[..., Any], *arguments: Any) -> str:
    with pytest.raises(Exception) as raised:
        work(*arguments)
    return "".join(traceback.format_exception(raised.value))


def test_a_reward_that_always_fails_is_one_warning_and_it_names_the_code_and_the_place_of_the_traceback(
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
