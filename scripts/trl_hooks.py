"""Make docs/trl_hooks.md of what the contract with TRL pins (tests/integration/trl_hooks.py) and of the sources.

    python scripts/trl_hooks.py [--write]

Prints the tables; with --write, puts them into the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from trl_hooks import ATTRIBUTES, ELSEWHERE, HOOKS, METHODS, ROOT, users

PAGE = ROOT / "docs" / "trl_hooks.md"
BEGIN, END = "<!-- begin: the tables -->\n", "<!-- end: the tables -->\n"


def tables() -> str:
    methods = [
        f"| `{name}` | {_list(METHODS[name])} | {_list(users(name))} | {_test(HOOKS[name].test)} |" for name in METHODS
    ]
    attributes = [
        f"| `{name}` | {HOOKS[name].where} | {_list(users(name))} | {_test(HOOKS[name].test)} |" for name in ATTRIBUTES
    ]
    others = [
        f"| `{name}` | {what} | {_list(users(name))} | {_test(test)} |" for name, (what, test) in ELSEWHERE.items()
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


def _test(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"


def page() -> str:
    """The page with the tables of now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}{tables()}{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    if "--write" in arguments:
        PAGE.write_text(page())
    else:
        print(tables())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
