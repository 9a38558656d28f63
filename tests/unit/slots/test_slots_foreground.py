"""A command that runs a queue: a signal that comes when all is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kit.waiting import DEADLINE_S

UNIT = Path(__file__).parents[1]
SIGNALS_AT_EXIT = """
import atexit, os, signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
atexit.register(lambda: [os.kill(os.getpid(), number) for number in (signal.SIGINT, signal.SIGTERM)])
folder = Path(sys.argv[1])
"""
EXPERIMENT = """
from experiment_yard import ExperimentYard, tree
sys.exit(ExperimentYard(folder).run(tree(algos={"DPO": {"lr": 1e-5}}, rounds_of_training=1)))
"""
SWEEP = """
import pytest
from sweep_yard import SweepYard, play
play(pytest.MonkeyPatch(), folder)
yard = SweepYard(folder)
sys.exit(yard.run(yard.sweep(1)))
"""


@pytest.mark.parametrize("command", [EXPERIMENT, SWEEP], ids=["experiment", "sweep"])
def test_a_signal_behind_the_last_line_changes_no_exit_code(command: str, tmp_path: Path) -> None:
    path = os.pathsep.join(str(folder) for folder in (UNIT.parents[1] / "src", UNIT / "runner", UNIT / "sweeps"))
    line = [sys.executable, "-c", SIGNALS_AT_EXIT + command, str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(line, env=env, timeout=DEADLINE_S, capture_output=True, text=True)
    assert (ran.returncode, "Exception ignored" in ran.stderr) == (0, False), ran.stdout + ran.stderr
