"""The way of one rollout through the code is the one that docs/design.md shows, and no longer than `scripts/route.py`
allows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from runs import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

RECORDINGS = 3  # two threads take part, so on a busy machine the order of their first calls may vary


def recording() -> list[str]:
    """Return the files that one rollout passes in a real run, in the order of the first visit."""
    command = [sys.executable, str(ROOT / "scripts" / "route.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return re.findall(r"^  (\S+\.py)$", done.stdout.split("The trainer: ")[0], re.MULTILINE)


def test_the_files_that_one_rollout_passes_are_those_of_the_page_in_the_same_order() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"<!-- route: .*? -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert block is not None
    shown = [line.split()[0] for line in block[1].splitlines()]
    assert any(recording() == shown for _ in range(RECORDINGS)), (
        "run scripts/route.py --write, and read the numbered steps above the list again"
    )
