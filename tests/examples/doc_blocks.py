"""The code blocks of the pages that a newcomer reads, and what it takes to execute them without a GPU or the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["docs/quick_start.md", "README.md", "docs/recipes.md"]
PAGES += sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("README.md"))

_BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)\n```", re.DOTALL)
_NOT_RUN = "not run: "
STEPS = "2"


class Block(NamedTuple):
    page: str
    language: str
    text: str
    not_run: str  # why it is not executed; empty: it is

    @property
    def commands(self) -> list[str]:
        """The lines that a reader types, without comments."""
        lines = self.text.splitlines()
        if self.language == "console":  # the other lines are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]


def blocks(page: str) -> Iterator[Block]:
    for found in _BLOCK.finditer((ROOT / page).read_text()):
        mark = found["mark"] or ""
        reason = mark.removeprefix(_NOT_RUN) if mark.startswith(_NOT_RUN) else ""
        yield Block(page, found["language"], found["text"], reason)


def setup_file_of_the_quick_start(model: str) -> str:
    """Its `my_trainer.py`, with a model of this disk in place of the hub's, and steps that take no time."""
    (text,) = (block.text for block in blocks("docs/quick_start.md") if block.language == "python")
    tiny = text.replace('"Qwen/Qwen3-0.6B"', repr(model)).replace("max_completion_length=32", "max_completion_length=3")
    assert text.count("Qwen/Qwen3-0.6B") == 1 and tiny.count("max_completion_length=3,") == 1
    return tiny


def shortened(command: str) -> str:
    """The command of a page with few steps, in place of those that the page has."""
    command = command.removeprefix(".venv/bin/")
    if command == "make demo":
        (line,) = re.findall(r"^demo: .*\n\t(.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        command = "async-grpo train " + line.partition("src/cli/train.py ")[2]
    command = re.sub(r"checkpoint-\d+", f"checkpoint-{STEPS}", command)
    command = command.replace("workers=2)", f"workers=2, steps={STEPS})")
    trains = re.match(r"(async-grpo (train|server|sweep)|python examples)", command)
    if trains and "--steps" in command:
        return re.sub(r"--steps \d+", f"--steps {STEPS}", command)
    return f"{command} --steps {STEPS}" if trains and "--resume" not in command else command


def endless(command: str) -> bool:
    """Whether it shows something until Ctrl-C."""
    return command.startswith("watch ") or command.endswith(("--watch", "--serve"))


def by_hand(command: str) -> bool:
    """Whether it is one of several processes that are started at the same time."""
    return command.startswith(("async-grpo server", "async-grpo worker"))
