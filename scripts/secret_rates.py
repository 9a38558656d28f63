"""How many of the planted secrets are found and how many harmless strings are changed, as SECURITY.md says.

    python scripts/secret_rates.py [--write]

Prints the sentences and what was missed; with --write, puts the sentences into the page. The strings are in
tests/unit/secret_corpus.py.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "unit"))

from secret_corpus import harmless, planted

from async_grpo.redaction import Redactor

PAGE = Path(__file__).resolve().parents[1] / "SECURITY.md"
BEGIN, END = "<!-- secret rates -->\n", "<!-- end of secret rates -->\n"
PIECE = 5  # characters of a secret that may not be left together


def missed() -> list[str]:
    """Planted strings of which a piece of a secret is left."""
    redact = Redactor()
    return [text for text, secrets in planted() if any(_is_left(secret, redact(text)) for secret in secrets)]


def taken() -> list[str]:
    """Harmless strings that are changed."""
    return [text for text in harmless() if Redactor()(text) != text]


def _is_left(secret: str, text: str) -> bool:
    return any(secret[start : start + PIECE] in text for start in range(len(secret) - PIECE + 1))


def rates() -> str:
    all_planted, all_harmless = len(planted()), len(harmless())
    found = (
        f"Of {all_planted} strings with a planted secret, {all_planted - len(missed())} were cleaned completely; of "
        f"{all_harmless} harmless ones, {len(taken())} lost something. The author of the rules made both lists, and "
        "changed rules and lists after looking at what was missed: strings by somebody else would give lower rates."
    )
    return textwrap.fill(found, 100) + "\n"


def main() -> None:
    print(rates())
    print("missed:", *missed(), "taken:", *taken(), sep="\n  ")
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{rates()}{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
