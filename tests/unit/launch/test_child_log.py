"""What the launcher shows of its children's logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_grpo.launch.child_log import LogLine, LogTail
from async_grpo.log import logger
from async_grpo.setup.process import LOG_FORMAT
from async_grpo.telemetry.run_log import STEP

LINE = "12:00:00 INFO    "


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log_worker_1.txt"


def append(path: Path, text: str | bytes) -> None:
    with path.open("ab") as file:
        file.write(text.encode() if isinstance(text, str) else text)


def test_our_lines_are_shown_once_with_the_child_s_name_and_library_noise_is_not(log: Path) -> None:
    tail = LogTail(log, "worker 1")
    assert tail.new_lines() == []
    append(log, f"{LINE}hello\nDownloading shards: 100%\n  warnings.warn(\n12:00:01 WARNING slow\n")
    assert [str(line) for line in tail.new_lines()] == [f"[worker 1] {LINE}hello", "[worker 1] 12:00:01 WARNING slow"]
    assert tail.new_lines() == []


def test_what_an_earlier_run_wrote_is_not_shown(log: Path) -> None:
    append(log, f"{LINE}old\nerror: old\n")
    tail = LogTail(log, "w")
    append(log, f"{LINE}new\n")
    assert [str(line) for line in tail.new_lines()] == [f"[w] {LINE}new"]
    assert tail.last_words() == f"{LINE}new"


def test_last_words_begin_at_the_last_error_or_traceback(log: Path) -> None:
    tail = LogTail(log, "w")
    traceback = "Traceback (most recent call last):\n  File x\nValueError: no"
    append(log, f"error: first\n{LINE}again\n{traceback}\n")
    assert tail.last_words() == traceback
    append(log, "error: The directory is in use.\nWait for it.\n")
    assert tail.last_words() == "error: The directory is in use.\nWait for it."


def test_last_words_without_an_error_are_the_last_lines(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, "".join(f"line {number}\n" for number in range(100)))
    assert tail.last_words().splitlines() == [f"line {number}" for number in range(70, 100)]


def test_last_words_are_all_there_after_lines_were_shown(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, "error: broken\n")
    tail.new_lines()
    assert tail.last_words() == "error: broken"


def test_a_child_that_wrote_nothing(log: Path) -> None:
    assert LogTail(log, "w").last_words() == "(it wrote nothing)"


def test_what_a_model_wrote_does_not_steer_the_terminal(log: Path) -> None:
    tail = LogTail(log, "w")
    append(log, f"{LINE}bad answer \x1b]0;hi\x07\nerror: \x1b[2J gone\n")
    assert [str(line) for line in tail.new_lines()] == [f"[w] {LINE}bad answer \\x1b]0;hi\\x07"]
    assert tail.last_words() == "error: \\x1b[2J gone"


def test_what_the_log_writes_is_read_with_its_level(log: Path) -> None:
    tail = LogTail(log, "server")
    sink = logger.add(log, format=LOG_FORMAT, level="INFO")
    try:
        logger.log(STEP, "step 1/2")
        logger.warning("two\nlines")
    finally:
        logger.remove(sink)
    first, second = tail.new_lines()
    assert first == LogLine("server", first.time, "STEP", "step 1/2")
    assert (second.level, second.text) == ("WARNING", "two")


def test_the_last_words_of_a_log_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    tail = LogTail(log, "w")
    log.write_text("12:00:00 INFO    it begins\n")
    tail.new_lines()
    with log.open("a") as file:
        log.unlink()
        file.write("error: the directory is gone\n")
    assert tail.last_words() == "error: the directory is gone"
