"""A launcher with children that are a few lines long, in place of servers and workers that load a model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from async_grpo.launch.launcher import launch
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import LineReader
from async_grpo.rundir.run_plan import RunPlan
from kit.plans import planned

REAL_PYTHON = sys.executable

# Takes the place of the interpreter: it is called as `PYTHON -m async_grpo.cli server --run-dir …`.
FAKE_PYTHON = """\
#!{python} {flags}
import json, os, signal, sys, time
from pathlib import Path

HERE = Path(__file__).parent
ROLE = sys.argv[3] if sys.argv[3] == "server" else "worker" + sys.argv[sys.argv.index("--id") + 1]
RUN = Path(sys.argv[sys.argv.index("--run-dir") + 1])
with (HERE / ("starts_" + ROLE)).open("a") as file:
    file.write(json.dumps([os.getpid(), sys.argv[3:], dict(os.environ)]) + "\\n")

def state():
    return json.loads((RUN / "run.json").read_text())["state"]

def end_run(as_state, step=3):
    data = json.loads((RUN / "run.json").read_text())
    new = RUN / "run.json.new"
    new.write_text(json.dumps({{**data, "state": as_state, "step": step}}))
    new.replace(RUN / "run.json")

def stop_when_asked(first=lambda: None, step=3):
    def stop(*_):
        first()
        end_run("stopped", step)
        sys.exit(0)
    signal.signal(signal.SIGTERM, stop)

def until(condition):
    while not condition():
        time.sleep(0.02)

def started(role):
    path = HERE / ("starts_" + role)
    return len(path.read_text().splitlines()) if path.exists() else 0

if ROLE == "server":
{server}
else:
{worker}
"""

FOLLOW_THE_RUN = 'until(lambda: state() != "running")'
FINISH_WHEN_ALL_ARE_THERE = 'until(lambda: started("worker1") and started("worker2")); end_run("finished")'
FOR_EVER = "until(lambda: False)"

# A launcher in a process of its own: `PYTHON -c LAUNCH STAGE_FOLDER` with `launch_env()`.
LAUNCH = """
import sys
from pathlib import Path
from stage import Stage
stage = Stage(Path(sys.argv[1]))
sys.executable = str(stage.python)
stage.launch()
"""


def launch_env() -> dict[str, str]:
    """So that `LAUNCH` finds this module and the package under test."""
    here = Path(__file__).parent
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(here.parents[2] / "src"), str(here), str(here.parents[1]))),
    }


class Stage:
    """A launcher's surroundings: the fake children's code, and what became of them."""

    def __init__(self, folder: Path, capsys: Any = None) -> None:
        self.folder = folder
        self._capsys = capsys
        self.python = folder / "python"
        self.run = RunDir(folder / "run")

    def children_are(self, *, server: str, worker: str, flags: str = "-S") -> None:
        bodies = {"server": indent(dedent(server), "    "), "worker": indent(dedent(worker), "    ")}
        self.python.write_text(FAKE_PYTHON.format(python=REAL_PYTHON, flags=flags, **bodies))
        self.python.chmod(0o755)

    def plan(self, **changes: Any) -> RunPlan:
        return planned(self.folder / "my_trainer.py", workers=2, **changes)

    def launch(self, **changes: Any) -> int:
        return launch(self.run.root, self.plan(**changes))

    def said(self) -> Any:
        """What was printed since the last call: `out` and `err`."""
        return self._capsys.readouterr()

    def starts(self, role: str) -> list[tuple[int, list[str], dict[str, str]]]:
        """What has started in that role so far; a child may be writing its line just now."""
        return [tuple(json.loads(line)) for line in LineReader(self.folder / f"starts_{role}").new_lines()]

    def pids(self) -> list[int]:
        return [start[0] for role in ("server", "worker1", "worker2") for start in self.starts(role)]
