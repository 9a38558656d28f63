"""The quick tests (`--quick N`): those that import no torch and start no process, found by what they do.

No test is marked. An audit hook ends a test that imports a heavy package or starts a process, and it counts as
skipped; so does a file whose import does. So a new test is quick without a word, and one that stops being quick leaves.
A run with fewer than N quick tests fails: then something that many tests use has begun to import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

HEAVY = frozenset({"torch", "transformers", "trl", "accelerate", "peft", "datasets", "vllm", "cupy"})
STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        type=int,
        metavar="N",
        help="only the tests that import no torch and start no process, of which at least N must pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (fewest := config.getoption("quick")) is not None:
        config.pluginmanager.register(Quick(fewest), "the quick tests")
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Quick:
    """The plugin of a run with `--quick`."""

    def __init__(self, fewest: int) -> None:
        self._fewest = fewest
        self._passed = 0
        self._is_watching = False
        self._seen: str | None = None  # what the test under way did that no quick test does
        loaded = HEAVY & sys.modules.keys()
        assert not loaded, f"{', '.join(loaded)} was imported before the first test"
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_watching:
            return
        if event in STARTS:
            self._leave("starts a process")
        elif event == "import" and (package := str(arguments[0]).partition(".")[0]) in HEAVY:
            self._leave(f"imports {package}")

    def _leave(self, reason: str) -> None:
        """Raise what no `except Exception` of the code under test takes for an error."""
        self._seen = f"not quick: it {reason}"
        raise pytest.skip.Exception(self._seen, allow_module_level=True)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._is_watching, self._seen = True, None
        try:
            yield
        finally:
            self._is_watching = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self) -> Any:
        with self._watching():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Any:
        with self._watching():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        """Report a test as skipped also where it caught the skip, or made it an error, in a thread for example."""
        report = yield
        if self._seen is not None and (report.failed or report.when == "call"):
            report.outcome, report.longrepr = "skipped", (str(item.path), item.location[1] or 0, self._seen)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._passed += report.when == "call" and report.passed

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (
            self._passed < self._fewest
            and exitstatus == pytest.ExitCode.OK
            and not hasattr(session.config, "workerinput")
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._passed < self._fewest:
            line = f"{self._passed} quick tests passed, and there are at least {self._fewest}: what imports torch now?"
            terminalreporter.write_line(line, red=True)
