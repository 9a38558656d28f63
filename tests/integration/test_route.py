"""The way of one rollout through the code is the one that docs/design.md shows."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from runs import ROOT

pytestmark = pytest.mark.integration


def test_the_files_that_one_rollout_passes_are_those_of_the_page_in_the_same_order() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "route.py")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rollout = done.stdout.split("The trainer: ")[0]
    passed = re.findall(r"^  (\S+\.py)$", rollout, re.MULTILINE)
    page = (ROOT / "docs" / "design.md").read_text()
    block = re.search(r"<!-- route: .*? -->\n```text\n(.*?)\n```", page, re.DOTALL)
    assert block is not None
    shown = [line.split()[0] for line in block[1].splitlines()]
    assert shown == passed, "run scripts/route.py --write, and read the numbered steps above the list again"
