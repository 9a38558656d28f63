"""What holds for every test: one core a process, and a garbage collector that leaves the imported modules alone.

Collecting imports torch, transformers and TRL: a million objects. Each full collection, of which every training calls
one, would take a second to look at them again.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the machine that runs the tests may have no more than two cores
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")  # TensorBoard's grpc would end forks that close its files
gc.disable()
pytest_plugins = ["quick", "levels"]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def log_of_this_test() -> Iterator[None]:
    """A command that a test calls logs to the test's own stderr, which is closed when the next test logs."""
    yield
    for module in {"loguru", "async_grpo.log"} & sys.modules.keys():
        logger = sys.modules[module].logger
        logger.remove()
        logger.add(sys.stderr)


@pytest.fixture(autouse=True)
def signals_of_this_test() -> Iterator[None]:
    """What a command that a test calls has signals do, to the end of its process, ends with the test."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def logged_from(level: str) -> Any:
    """A fixture: the lines that are logged from this level on."""

    @pytest.fixture
    def logged() -> Iterator[list[str]]:
        from async_grpo.log import logger

        lines: list[str] = []
        sink = logger.add(lambda message: lines.append(message.record["message"]), level=level)
        yield lines
        logger.remove(sink)

    return logged


decisions, messages, warnings = (logged_from(level) for level in ("DEBUG", "INFO", "WARNING"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Nobody should take a suite without a browser for the whole suite."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "tests/browser/" in report.nodeid]
    if skipped:
        reason = skipped[0].longrepr[2].removeprefix("Skipped: ")
        terminalreporter.write_line(f"the tests in a browser were SKIPPED: {reason}", yellow=True)
