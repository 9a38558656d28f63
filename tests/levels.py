"""The tests of `make test` (`--promised`): unit tests, and of each promise the test that fails first.

docs/promises.md names these. What is a whole run or takes seconds (marker `integration`) is left to `make test-all`,
unless it is one of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
UNIT = ("tests/unit", "tests/fuzz")


class Promise(NamedTuple):
    """A row of the page: what is promised, and the names of tests and files in the other two columns."""

    text: str
    first: list[str]
    end_to_end: list[str]


def promises() -> list[Promise]:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip().replace("`", "") for cell in row] for row in rows]
    return [Promise(text, _named(first), _named(rest)) for text, first, rest in cells if text != "promise"]


def _named(cell: str) -> list[str]:
    return cell.split(", ") if cell else []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--promised", action="store_true", help="unit tests, and the tests that docs/promises.md names first"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--promised"):
        dear = [test for promise in promises() for test in promise.first if not test.startswith(UNIT)]
        config.args[:] = [str(ROOT / name) for name in (*UNIT, *dear)]


def pytest_itemcollected(item: pytest.Item) -> None:
    """What lies in tests/integration has that marker."""
    if item.nodeid.startswith("tests/integration/"):
        item.add_marker("integration")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--promised"):
        return
    first = {test for promise in promises() for test in promise.first}
    left = [
        item for item in items if item.get_closest_marker("integration") and item.nodeid.partition("[")[0] not in first
    ]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]
