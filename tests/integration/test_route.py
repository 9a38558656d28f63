"""The way of one rollout through the code is the one that docs/design.md shows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from runs import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RECORDINGS = 3  # two threads take part, so on a busy machine the order of their first calls may vary
MOST_FUNCTIONS = 173  # lower it with the way; `scripts/route.py --check` has the aim


def recording() -> tuple[int, list[str]]:
    """How many functions one rollout passes in a real run, and their files in the order of the first visit."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "route.py")], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    way = done.stdout.split("The trainer: ")[0]
    return len(re.findall(r"^ {6}\S", way, re.MULTILINE)), re.findall(r"^  (\S+\.py)$", way, re.MULTILINE)


def test_the_files_that_one_rollout_passes_are_those_of_the_page_in_the_same_order() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"<!-- route: .*? -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert block is not None
    shown = [line.split()[0] for line in block[1].splitlines()]
    recordings = []
    for _ in range(RECORDINGS):
        functions, files = recording()
        assert functions <= MOST_FUNCTIONS
        recordings.append(files)
        if files == shown:
            return
    assert shown in recordings, "run scripts/route.py --write, and read the numbered steps above the list again"
