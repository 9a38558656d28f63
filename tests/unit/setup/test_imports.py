"""A module is acted on when it has been imported: before whoever imports it can change it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from async_grpo.setup import imports
from async_grpo.setup.imports import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One whose import leaves `value` at 1."""
    folder = tmp_path / "noted_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("noted_package", "noted_package.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "noted_package.inner"


def test_it_is_called_with_what_the_import_left(package: str) -> None:
    seen: list[tuple[ModuleType, int]] = []
    assert when_imported(package, lambda module: seen.append((module, module.value))) is not None
    assert package not in sys.modules and not seen, "nothing is imported for it"
    module = importlib.import_module(package)
    module.value = 2
    assert seen == [(module, 1)]


def test_a_module_that_is_there_is_acted_on_at_once(package: str) -> None:
    module, seen = importlib.import_module(package), []
    assert when_imported(package, seen.append) is None
    assert seen == [module]


def test_two_that_wait_for_the_same_module_both_hear_of_it(package: str) -> None:
    heard: list[str] = []
    for name in ("outer", "inner"):
        sys.meta_path.insert(0, imports._WhenImported(package, lambda module, name=name: heard.append(name)))
    importlib.import_module(package)
    assert heard == ["outer", "inner"]
