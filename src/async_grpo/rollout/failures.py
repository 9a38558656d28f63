"""The prompt groups that failed on a worker, and its log of them: each kind once, however many groups it costs."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from async_grpo.errors import RunRefused
from async_grpo.log import logger

MOST_TEXT = 300  # characters of an error in the log
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_MARGIN = re.compile(r"^ +\| ?", re.MULTILINE)  # before the lines of an ExceptionGroup
_CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
_NOT_OF_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), "<frozen ", "<string>", "<template>")
_INSTALLED = ("/site-packages/", "/dist-packages/")


def refusal_in(error: BaseException) -> RunRefused | None:
    """The `RunRefused` that `error` is, holds, or was raised for."""
    return next((cause for cause in causes_of(error) if isinstance(cause, RunRefused)), None)


def causes_of(error: BaseException) -> list[BaseException]:
    """The error itself, and all that it holds or was raised for."""
    seen: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        waiting += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return seen


class Failures:
    """Logs failed attempts. A kind is the type of an error and the line that raised it: texts may name the prompt.

    Args:
        quarantine: the folder with the tracebacks of the groups that are given up.
    """

    def __init__(self, quarantine: Path) -> None:
        self._quarantine = quarantine
        self._logged: set[tuple[str, str]] = set()

    def add(self, seq: int, attempt: int, traceback: str) -> None:
        """Log it: the first of its kind as a warning, the others for `--log-level DEBUG`."""
        what, where = summary(traceback)
        kind = (what.partition(":")[0], where)
        said = f"prompt group {seq} failed (attempt {attempt + 1}): {what}{f' ({where})' if where else ''}"
        if kind in self._logged:
            logger.debug("{}", said)
            return
        self._logged.add(kind)
        logger.warning(
            "{}. Others of this kind are not shown; the tracebacks of groups that are given up: {}",
            said,
            self._quarantine / "*.reason",
        )


def summary(traceback: str) -> tuple[str, str]:
    """What was raised, and where, "" if unknown: `FILE:LINE` of the user's code, and of the library that it called."""
    traceback = _MARGIN.sub("", traceback)
    frames = [*_FRAME.finditer(traceback)]
    if not frames:
        return traceback.strip().rpartition("\n")[2][:MOST_TEXT], ""
    below = traceback[frames[-1].end() :].splitlines()[1:]
    what = next((line for line in below if line[:1].strip()), "")
    cause, caused, _ = traceback.partition(_CAUSED)
    causing = [*_FRAME.finditer(cause)] if caused else []
    raised = _line_of((causing or frames)[-1])
    users = next((_line_of(frame) for frame in reversed(frames) if is_users_code(frame[1])), raised)
    return what[:MOST_TEXT], raised if users == raised else f"{users}, raised in {raised}"


def _line_of(frame: re.Match[str]) -> str:
    return f"{Path(frame[1]).name}:{frame[2]}"


def is_users_code(file: str) -> bool:
    """Whether a file with code is neither ours, nor Python's, nor of an installed package."""
    return not (file.startswith(_NOT_OF_USERS) or any(folder in file for folder in _INSTALLED))
