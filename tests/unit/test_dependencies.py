"""What the package imports is declared in pyproject.toml, and what is declared is imported."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMPORTED_AS = {  # where the name of a distribution is another
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "openenv-core": "openenv",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "cupy-cuda12x": "cupy",
    "cupy-cuda13x": "cupy",
}
PACKAGES = ("async_grpo", "async_grpo_experiments", "async_grpo_ipc")
USERS = {"bitsandbytes", "openai", "unsloth"}  # a user's setup file or agent imports them
TOOLS = {"bench", "docs", "fuzz", "notebook", "test"}  # extras
TYPES = {"_typeshed"}  # of a type checker: nothing imports it at run time
# The user's tracker, imported where `report_to` names it; what comes with verifiers, and with torch for CUDA.
WHERE_THERE = {"trackio", "mcp", "triton"}


def imported() -> set[str]:
    found: set[str] = set()
    for package in PACKAGES:
        for path in (ROOT / "src" / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    found.add(node.module or "")
    return {name.partition(".")[0] for name in found}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    of_extras = [one for name in extras.keys() - TOOLS for one in extras[name]]
    names = {Requirement(one).name for one in (*project["dependencies"], *of_extras)} - USERS
    declared = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    others = imported() - sys.stdlib_module_names - {*PACKAGES} - TYPES
    assert others - WHERE_THERE == declared
