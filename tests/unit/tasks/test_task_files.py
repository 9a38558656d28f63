"""The forms in which people name their files."""

from __future__ import annotations

import ast
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import pytest

from async_grpo.errors import UsageError
from async_grpo.tasks.data import literal_of
from async_grpo.tasks.task_files import LARGEST, files_by_task

MATH, LOGIC = Path("/d/math__combined_54.4k.parquet"), Path("/d/logic.parquet")
BOTH = {"math": [MATH], "logic": [LOGIC]}


@pytest.mark.parametrize(
    "given",
    [
        {"math": str(MATH), "logic": [LOGIC]},
        [MATH, LOGIC],
        f"[{MATH}, {LOGIC}]",
        f"['{MATH}','{LOGIC}']",
        f'{{"math": "{MATH}", "logic": ["{LOGIC}"]}}',
        f"{{\n  'math':'{MATH}',\n  'logic':'{LOGIC}',\n}}",
        f"{{math: {MATH}, logic: {LOGIC}}}",
        UserList([MATH, str(LOGIC)]),  # no list, as OmegaConf's is none
        UserDict(math=MATH, logic=UserList([LOGIC])),
    ],
    ids=lambda given: type(given).__name__,
)
def test_all_forms_name_the_same_files(given: Any) -> None:
    assert files_by_task(given) == BOTH


def test_a_path_alone_is_of_the_task_in_its_name() -> None:
    assert files_by_task(str(MATH)) == files_by_task(MATH) == {"math": [MATH]}
    assert files_by_task(LOGIC) == {"logic": [LOGIC]}
    odd = "!!python/object/apply:os.system [x]"  # no list and no mapping: a path, however odd
    assert list(files_by_task(odd).values()) == [[Path(odd)]]


def test_files_of_one_domain_are_one_task() -> None:
    names = ["math__a.parquet", "math__b.parquet"]
    assert files_by_task(names) == {"math": [Path(name) for name in names]}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("{math:/a.parquet}", "YAML needs a space after the colon"),
        ("{math: a.parquet, math: b.parquet}", "Task 'math' is there twice"),
        ("[" + "a," * LARGEST + "]", "at most 1,048,576 bytes"),
        ("{3: a.parquet}", "The name of a task must be a text, got 3"),
        ("{math: []}", "Task 'math' has no file"),
        *((text, "cannot be read as YAML") for text in ("{math: a.parquet", "[" * 5000 + "]" * 5000)),
        ("{math: !!python/name:os.system ''}", "cannot be read as YAML"),
        *(
            (given, "must be a path or a list of paths")
            for given in ("{math: 3}", "{math: {deep: a.parquet}}", [""], 3)
        ),
        *((given, "There is no file to read") for given in ("[]", {})),
    ],
)
def test_what_names_no_files_is_refused_with_a_sentence(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        files_by_task(given)


# --- Literals: ---------------------------------------------------------------------------------------------------


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
