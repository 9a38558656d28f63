"""What TRL and PEFT warn of becomes lines of our log, the first of each kind; everything else goes where it went."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType

import pytest

from async_grpo.setup.library_warnings import LIBRARIES, show_library_warnings


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
