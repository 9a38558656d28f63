"""The way of one rollout through the code is as docs/design.md shows it, and no longer than house.toml allows."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

from kit.runs import ROOT

RECORDINGS = 3  # two threads take part, so on a busy machine the order of their first calls may vary


def test_the_files_that_one_rollout_passes_are_those_of_the_page_in_the_same_order() -> None:
    shown = runpy.run_path(str(ROOT / "scripts" / "house.py"))["files_of_the_way"](ROOT)
    found = ("not recorded", shown)
    for _ in range(RECORDINGS):
        if found != ("", shown):
            found = recording()
    assert found == ("", shown), "run scripts/route.py --write, and read the numbered steps above the list again"


def recording() -> tuple[str, list[str]]:
    """Return what is wrong with the way of a rollout in a real run, and its files in the order of the first visit."""
    command = [sys.executable, str(ROOT / "scripts" / "route.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    wrong = done.stderr if done.returncode else ""
    return wrong, re.findall(r"^  (\S+\.py)$", done.stdout.split("The trainer: ")[0], re.MULTILINE)
