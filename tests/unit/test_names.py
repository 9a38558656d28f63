"""Rules for the sources: names of classes, dtype and device of tensors, and what test modules import."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

SRC, TESTS = Path(__file__).parents[2] / "src", Path(__file__).parents[1]
INTEGERS = ("arange", "randperm")
OTHERS = ("as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros")
MAKERS = {*INTEGERS, *OTHERS}


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


def test_no_test_module_imports_another() -> None:
    """What several share is in `tests/kit`, or in a module beside them."""
    imports = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    found = {path: {*imports.findall(path.read_text())} - {path.stem} for path in TESTS.rglob("*.py")}
    assert not {path: others for path, others in found.items() if others}
