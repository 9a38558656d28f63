"""Act on a module as soon as it has been imported, and not before: the setup file decides when that is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def when_imported(name: str, then: Callable[[ModuleType], None]) -> importlib.abc.MetaPathFinder | None:
    """Call `then` with module `name`: at once if it is there, else when it has been imported.

    Returns what waits for it in `sys.meta_path`, if anything does.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return None
    finder = _WhenImported(name, then)
    sys.meta_path.insert(0, finder)
    return finder


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls `then` with module `name` as soon as that has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another one of this class may be among them
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return None
        loader: importlib.abc.Loader = spec.loader
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
