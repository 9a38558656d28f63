"""Rules for the sources: no class has the name of another one, and a tensor names its dtype and device."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
INTEGERS = ("arange", "randperm")
MAKERS = (
    *INTEGERS,
    "as_tensor",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "tensor",
    "zeros",
)


def test_no_class_has_the_name_of_another() -> None:
    """A `_` in front of it makes no difference."""
    definitions: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                definitions[node.name.lstrip("_")].append(f"{path.relative_to(SRC)}:{node.lineno}")
    assert {name: found for name, found in definitions.items() if len(found) > 1} == {}


def test_each_tensor_names_its_dtype_and_device() -> None:
    """A setup file may have changed the default ones, which are those of the process."""
    silent = []
    for path in sorted(SRC.glob("async_grpo*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and (maker := ast.unparse(node.func)).startswith("torch."):
                needed = {"device"} if maker[6:] in INTEGERS else {"device", "dtype"}
                if maker[6:] in MAKERS and needed - {keyword.arg for keyword in node.keywords}:
                    silent.append(f"{path.relative_to(SRC)}:{node.lineno}: {ast.unparse(node)}")
    assert silent == []
