"""Literals: what is read as Python reads it, and what Python would read too slowly and is refused before."""

from __future__ import annotations

import ast

import pytest

from async_grpo.tasks.data import literal_of


@pytest.mark.parametrize(
    "text",
    [
        "{'a': 'b', 'c': (1, -2.5e3, None, True)}",
        r"""{'if': "f'{a}'", "x": 'it\'s \d', 'y': '''a'f'\'''', "z": rb'\x', 'u': '' 'joined' "too"}""",
        "['a',  # of f'\n 'b']",
        "'\\\n'",
    ],
)
def test_a_literal_is_what_python_reads(text: str) -> None:
    assert literal_of(text) == ast.literal_eval(text)


@pytest.mark.parametrize(
    "text", ["f'{a}'", 'F"""{a}"""', "rf'{a}'", "{'a': Fr'{b}'}", "'a'f'{b}'", "#'''\n f'{a}' #'''", "#'\r f'{a}' '"]
)
def test_an_f_string_is_refused_before_it_is_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_grpo.tasks.data.ast", None)
    with pytest.raises(ValueError, match="no literal"):
        literal_of(text)


@pytest.mark.parametrize("text", ["{1, 2}", "[{2: 1}]", "{'a': {(-1, -2): 3, (-2, -1): 4}}", "{**{'a': 1}}"])
def test_keys_whose_hashes_a_file_can_choose_are_refused_before_they_are_compared(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ast, "literal_eval", None)
    with pytest.raises(ValueError, match="a key that is no text"):
        literal_of(text)
