"""Output that nobody reads, or for which there is no room, ends nothing: it is dropped, counted and reported."""

from __future__ import annotations

import io
import logging
import os
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType

import pytest

from async_grpo.setup.library_warnings import LIBRARIES, show_library_warnings
from async_grpo.setup.output import LossyOutput

PRINTS = """
import sys
from async_grpo.log import logger
from async_grpo.setup.process import set_up_log
set_up_log("INFO")
for number in range(3):
    print("line", number, flush=True)
    logger.info("logged {}", number)
print("still here", file=open(sys.argv[1], "w"))
"""

CLOSED = """
import sys
from async_grpo.setup.process import set_up_log
set_up_log("INFO")
print("to 1")
print("to 2", file=sys.stderr)
"""


class Disk(io.StringIO):
    """A stream without room."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_lines_without_room_are_dropped_and_counted() -> None:
    disk, told = Disk(), []
    output = LossyOutput(disk, tell=told.append)
    print("one", file=output)
    disk.full = True
    for _ in range(3):
        print("lost", file=output, flush=True)
    print("half", file=output, end="")
    assert told == ["output cannot be written (No space left on device): the run continues without it\n"]
    disk.full = False
    print(" a line", file=output)
    assert disk.getvalue() == ("one\n\n[3 lines of this output are missing: they could not be written]\nhalf a line\n")
    assert output.dropped == 0 and not output.isatty()


def test_text_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w", encoding="ascii") as file:
        output = LossyOutput(file)
        print("→ \udcff", file=output)
        output.reconfigure(line_buffering=True)
        output.buffer.write(b"bytes")
    assert (tmp_path / "out").read_text() == "\\u2192 \\udcff\nbytes"


def test_a_process_goes_on_without_its_output_and_ends_well(tmp_path: Path) -> None:
    """On a full disk and with a closed pipe, until the interpreter has ended."""
    reads, writes = os.pipe()
    os.close(reads)
    with Path("/dev/full").open("w") as full, os.fdopen(writes, "w") as closed:
        for name, stdout in (("full", full), ("closed", closed)):
            mark = tmp_path / name
            command = [sys.executable, "-c", PRINTS, str(mark)]
            done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
            assert (done.returncode, mark.read_text()) == (0, "still here\n")
            first, *log = done.stderr.splitlines()
            assert first.startswith("standard output cannot be written (") and first.endswith("continues without it")
            assert [line.split()[-1] for line in log] == ["0", "1", "2"]
        done = subprocess.run([*command[:-1], str(tmp_path / "both")], stdout=full, stderr=full, timeout=60)
        assert (done.returncode, (tmp_path / "both").read_text()) == (0, "still here\n")


@pytest.mark.parametrize("number", [1, 2])
def test_a_process_whose_output_was_closed_before_it_began(number: int) -> None:
    """As by `train >&-`, or by a daemon that gives its children none: Python has None for it."""
    other = 3 - number
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(CLOSED)} {number}>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, (done.stdout, done.stderr)[other - 1]) == (0, f"to {other}\n")


# --- What TRL and PEFT warn of becomes lines of our log, the first of each kind; everything else goes where it went


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """The lines of our log."""
    lines: list[str] = request.getfixturevalue("warnings")
    before = {name: list(logging.getLogger(name).handlers) for name in LIBRARIES}
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: lines.append(f"as before: {message}")
        show_library_warnings()
        show_library_warnings()
        yield lines
    for name, handlers in before.items():
        logging.getLogger(name).handlers = handlers


def of_module(module: str, function: Callable[[str], None]) -> Callable[[str], None]:
    """The function as if it were that module's."""
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__, {"__name__": module, "__builtins__": __builtins__, "warnings": warnings})


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=2)


def warn_of_more(text: str) -> None:
    warnings.warn(f"more {text}", stacklevel=1)


def test_a_warning_is_told_once_for_each_line_that_gives_it(told: list[str]) -> None:
    of_peft, more = of_module("peft.tuners.lora", warn), of_module("peft.tuners.lora", warn_of_more)
    for text in ("a  long\n   one", "again"):
        of_peft(text)
    more("a")
    of_module("my_trainer", warn)("mine")
    of_module("trlx", warn)("of another library")
    assert told == [
        "said by peft.tuners.lora: a long one",
        "as before: again",
        "said by peft.tuners.lora: more a",
        "as before: mine",
        "as before: of another library",
    ]


def test_a_record_of_trls_logger_is_told_once(told: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    of_trl = logging.getLogger("trl.trainer.grpo_trainer")
    of_trl.propagate = True
    for value in (1, 2):
        of_trl.warning("[RANK 0] loss_type %s is deprecated", value)
    of_trl.info("nothing")
    assert told == ["said by trl.trainer.grpo_trainer: loss_type 1 is deprecated"]


def test_what_trl_says_while_it_builds_a_trainer_is_told(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By accelerate's logger, as TRL has it."""
    from accelerate import PartialState
    from accelerate.logging import get_logger

    PartialState()
    get_logger("trl.trainer.grpo_trainer").warning("use_cache is on")
    assert told == ["said by trl.trainer.grpo_trainer: use_cache is on"]
