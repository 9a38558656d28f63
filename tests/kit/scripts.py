"""Python files that are part of no package: scripts, recipes, examples."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def module_at(path: Path) -> ModuleType:
    """Execute a file as the module of its name; dataclasses look for it under that name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
