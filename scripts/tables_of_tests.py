"""A page with tables that are made from what the tests say: the caller has the page and the tables."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- begin: the tables -->\n", "<!-- end: the tables -->\n"


def linked(test: str) -> str:
    """Return a link to the file of a test, `tests/unit/test_x.py::test_that_it_works`, with its name in words.

    One of a parameter, `tests/unit/test_x.py::test_that_it_works[with a file]`, has that in the place of its name.
    """
    path, _, name = test.partition("::")
    name = name.removesuffix("]").rpartition("[")[2]
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"


def with_tables(page: Path, tables: str) -> str:
    """Return the text of the page with the tables of now."""
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}{tables}{END}{rest.split(END)[1]}"


def print_or_write(page: Path, tables: str, arguments: list[str]) -> int:
    if "--write" in arguments:
        page.write_text(with_tables(page, tables))
    else:
        print(tables)
    return 0
