"""The tables of docs/trl.md, made from what the tests say of TRL (tests/integration/trl_table.py).

    python scripts/trl_table.py [--write]

Prints the tables; with --write, puts them into the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

from matrix import ROWS
from tables_of_tests import linked, print_or_write, with_tables
from trl_table import (
    DIFFERENTIAL,
    DRAWN,
    IRRELEVANT,
    REFUSED,
    SHOWN_ARGUMENTS,
    SHOWN_FIELDS,
    SHOWN_METHODS,
)

from async_grpo.setup.overrides import EFFECTS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "trl.md"
COMPARED = (
    "`make test-matrix` trains each row at staleness 0 and with plain TRL on the same completions, with",
    "tiny models of large random weights. Equal: losses, gradient norms and all other metrics within",
    "1e-4.",
)


def tables() -> str:
    fields = [("as in TRL: random values are compared with plain TRL", DIFFERENTIAL, " ".join(sorted(DRAWN)))]
    irrelevant = [f"| {_names(names)} | {reason} |" for reason, names in IRRELEVANT]
    refused = [f"| `{name}` | {sentence.replace('.*', ' … ')} |" for name, _, sentence in REFUSED]
    return "\n".join(
        [
            *("", "### Fields that are honoured", ""),
            *_shown(fields + SHOWN_FIELDS, "fields of `GRPOConfig`"),
            *("", "### Fields that are refused", "", "| field | the message |", "|---|---|", *refused),
            *("", "### Fields that make no difference", "", "| fields | why |", "|---|---|", *irrelevant),
            *("", "### Arguments of the trainer", ""),
            *_shown(SHOWN_ARGUMENTS, "arguments"),
            *("", "### Methods that are overridden or patched", ""),
            *("| methods | an override | shown by |", "|---|---|---|", *map(_method_row, EFFECTS.items())),
            *("", "### Model families, adapters and settings that were compared", "", *COMPARED, ""),
            *("| what | at staleness 0, compared with plain TRL |", "|---|---|", *_compared()),
            "",
        ]
    )


def _shown(rows: list[tuple[str, str, str]], what: str) -> list[str]:
    head = [f"| {what} | how | shown by |", "|---|---|---|"]
    return head + [f"| {_names(names)} | {how} | {linked(test)} |" for how, test, names in rows]


def _method_row(effect: tuple[str, str]) -> str:
    text, names = effect
    tests = dict.fromkeys(linked(test) for name, test in SHOWN_METHODS.items() if name in names.split())
    return f"| {_names(names)} | {text} | {', '.join(tests)} |"


def _compared() -> list[str]:
    """A line for each kind and verdict: `family` and the others."""
    lines: dict[tuple[str, str], list[str]] = {}
    for key, row in ROWS.items():
        kind, _, name = key.partition(" ")
        lines.setdefault((kind, row.verdict), []).append(name)
    many = {"family": "families", "adapter": "adapters", "setting": "settings"}
    return [f"| {many[kind]}: {', '.join(names)} | {verdict} |" for (kind, verdict), names in lines.items()]


def _names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split())


def page() -> str:
    return with_tables(PAGE, tables())


if __name__ == "__main__":
    sys.exit(print_or_write(PAGE, tables(), sys.argv[1:]))
