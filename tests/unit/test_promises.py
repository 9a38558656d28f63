"""docs/promises.md: each promise has one test that fails first, and each test of whole runs belongs to a promise."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

from levels import promises

ROOT = Path(__file__).parents[2]
OF_WHOLE_RUNS = re.compile(r"tests/(integration|chaos|slurm|examples|recipes|with_\w+)/")
OF_OTHERS = re.compile(r"tests/with_|\b(slow|gpu)\b")  # what `make test` does not run
FEWEST_PROMISES, FEWEST_TESTS = 80, 500


@cache
def known() -> dict[str, str]:
    """What each test is marked by, its parameters aside, by its name: `tests/unit/test_promises.py::test_x`."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file, body = str(path.relative_to(ROOT)), ast.parse(path.read_text()).body
        marks = " ".join(ast.unparse(node.value) for node in body if isinstance(node, ast.Assign) and is_mark(node))
        classes = [(f"{file}::{node.name}", node.body) for node in body if isinstance(node, ast.ClassDef)]
        for holder, inner in ((file, body), *classes):
            for test in inner:
                if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test"):
                    own = [mark for mark in map(ast.unparse, test.decorator_list) if "parametrize" not in mark]
                    found[f"{holder}::{test.name}"] = " ".join([marks, *own])
    return found


def is_mark(node: ast.Assign) -> bool:
    return ast.unparse(node.targets[0]) == "pytestmark"


def test_each_promise_is_said_once() -> None:
    said = Counter(promise.text for promise in promises())
    assert len(said) >= FEWEST_PROMISES, f"only {len(said)} promises were found"
    assert said.total() == len(said), said.most_common(1)


def test_each_promise_has_one_test_that_fails_first_which_make_test_runs() -> None:
    for text, first, _ in promises():
        assert len(first) == 1 and first[0] in known(), f"{text} {first} is not one test that there is"
        assert not OF_OTHERS.search(f"{first[0]} {known()[first[0]]}"), f"{text} `make test` does not run {first[0]}"


def test_what_the_page_names_is_there() -> None:
    there = known().keys() | {test.partition("::")[0] for test in known()}
    missing = {name for promise in promises() for name in promise.end_to_end} - there
    assert not missing, f"docs/promises.md names {sorted(missing)}"


def test_each_test_of_whole_runs_belongs_to_a_promise() -> None:
    of_promises = {name for promise in promises() for name in (*promise.first, *promise.end_to_end)}
    tests = [test for test in known() if OF_WHOLE_RUNS.match(test)]
    assert len(tests) >= FEWEST_TESTS, f"only {len(tests)} tests were found"
    alone = [test for test in tests if not {test, test.partition("::")[0]} & of_promises]
    assert not alone, f"docs/promises.md has no promise of which these are tests: {alone}"
