"""A run whose disk is full at its very end: what has to be written waits for room, or is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import SETUP, command, read

pytestmark = [pytest.mark.slow, pytest.mark.integration]
FULL = str(SETUP.with_name("full_at_the_end.py"))


def test_what_finds_no_room_at_the_end_of_a_run_is_written_when_there_is_some(tmp_path: Path) -> None:
    with command("train", FULL, "-n", "1", "--steps", "1", cwd=tmp_path, TEST_FULL="3") as run:
        assert run.wait() == 0, run.output
    assert "no room for" in run.output and "Waiting for room" in run.output
    for name in ("summary.json", "run.json"):
        assert read(tmp_path / "worker" / name)["state"] == "finished"
    assert "fresh tokens are too few" in run.output, "one batch does not say whether trainer and sampler agree"


def test_a_run_that_is_stopped_while_it_waits_for_room_at_its_end_says_what_is_missing(tmp_path: Path) -> None:
    with command("train", FULL, "-n", "1", "--steps", "4", cwd=tmp_path, TEST_FULL="1000000") as run:
        run.wait_until(lambda: "Waiting for room" in run.output, "the end of the run")
        run.process.terminate()
        assert run.wait() == 1, run.output
    assert "error: The disk is full: no room for" in run.output, run.output
