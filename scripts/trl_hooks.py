"""Make docs/trl_hooks.md of what the contract with TRL pins (tests/integration/trl_hooks.py) and of the sources.

    python scripts/trl_hooks.py [--write]

Prints the tables; with --write, puts them into the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from tables_of_tests import linked, print_or_write, with_tables
from trl_hooks import ATTRIBUTES, ELSEWHERE, HOOKS, METHODS, ROOT, users

PAGE = ROOT / "docs" / "trl_hooks.md"


def tables() -> str:
    methods = [
        f"| `{name}` | {_list(METHODS[name])} | {_list(users(name))} | {linked(HOOKS[name].test)} |" for name in METHODS
    ]
    attributes = [
        f"| `{name}` | {HOOKS[name].where} | {_list(users(name))} | {linked(HOOKS[name].test)} |" for name in ATTRIBUTES
    ]
    others = [
        f"| `{name}` | {what} | {_list(users(name))} | {linked(test)} |" for name, (what, test) in ELSEWHERE.items()
    ]
    return "\n".join(
        [
            *("", "## Methods of `GRPOTrainer`", ""),
            *("| method | parameters that we rely on | touched by | shown by |", "|---|---|---|---|", *methods),
            *("", "## Attributes of `GRPOTrainer`", ""),
            *("| attribute | of which trainer | touched by | shown by |", "|---|---|---|---|", *attributes),
            *("", "## Of other classes and modules", ""),
            *("| name | what is done with it | touched by | shown by |", "|---|---|---|---|", *others),
            "",
        ]
    )


def _list(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def page() -> str:
    return with_tables(PAGE, tables())


if __name__ == "__main__":
    sys.exit(print_or_write(PAGE, tables(), sys.argv[1:]))
