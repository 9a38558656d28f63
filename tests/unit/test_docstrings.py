"""Docstrings begin with a verb or a noun: a fragment whose subject is the name above it is no sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples")
FRAGMENTS = ("Of ", "That ")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def fragments(source: str) -> Iterator[tuple[str, str]]:
    """The name and the first line of each docstring that begins with one of these words."""
    if not re.search(rf'"""\s*({"|".join(FRAGMENTS)})', source):
        return  # most files need not be parsed
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if text is not None and text.startswith(FRAGMENTS):
            yield getattr(node, "name", "the module"), text.splitlines()[0]


def test_no_docstring_begins_with_of_or_that() -> None:
    modules = [sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS]
    found = [(str(it.relative_to(ROOT)), *found) for it in chain(*modules) for found in fragments(it.read_text())]
    assert all(modules) and not found, "begin with a verb or a noun"


def test_a_fragment_is_found() -> None:
    assert list(fragments('class Shares:\n    """Of the last minute.\n\n    Of the workers.\n    """\n')) == [
        ("Shares", "Of the last minute.")
    ]
    assert not list(fragments('"""Offers."""\n\ndef of():\n    """Shares of the last minute."""\n'))
