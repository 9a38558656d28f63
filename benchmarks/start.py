"""From the command to the end of the first optimizer step: a server and two workers, against plain TRL.

Both train the same tiny model, so nearly all of the time is start-up: the imports, the model, the first rollouts. Plain
TRL is a script that calls `get_trainer().train()`, and repairs TRL 1.15 for CPUs (`setup/trl_compat.py`). The rounds
alternate, and a first round, which fills the caches of the file system, is not counted.

python benchmarks/start.py --json benchmarks/results/start.json   # on a machine that does nothing else; 2 to 5 minutes
python benchmarks/start.py --quick                                # one round
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import ROOT, Row, as_text, row, write_json

SETUP = ROOT / "benchmarks" / "setups" / "qwen3_shape.py"
WORKERS = 2
ROUNDS = 5
DEADLINE_S = 300.0

MARKED = '''"""The setup file, with a mark at the end of the first optimizer step."""

import os
import sys
from pathlib import Path

sys.path.insert(0, {folder!r})
import {module}


def get_trainer():
    from transformers import TrainerCallback

    class Marks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            Path(os.environ["FIRST_STEP"]).touch()

    trainer = {module}.get_trainer()
    trainer.add_callback(Marks())
    return trainer
'''
PLAIN = """
import runpy, sys
trainer = runpy.run_path(sys.argv[1])["get_trainer"]()
from async_grpo.setup.trl_compat import repair_trl
repair_trl()
trainer.train()
"""


def seconds(command: Sequence[str], folder: Path) -> float:
    """How long the command takes to its first optimizer step; it is waited for until it has ended."""
    mark = folder / "first_step"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FIRST_STEP": str(mark), "LOG_LEVEL": "WARNING"}
    env |= {"QWEN3_SHAPE": "tiny", "COMPLETION": "16", "STEPS": "1", "TQDM_DISABLE": "1"}
    began = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        while not mark.exists():
            if process.poll() is not None or time.monotonic() - began > DEADLINE_S:
                process.kill()
                raise SystemExit(f"no step of {' '.join(command)}:\n{(folder / 'output.txt').read_text()}")
            time.sleep(0.005)
        took = time.monotonic() - began
        process.wait(timeout=DEADLINE_S)
    return took


def in_a_new_folder(command: Callable[[str], list[str]]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        marked = Path(folder) / "marked_setup.py"
        marked.write_text(MARKED.format(folder=str(SETUP.parent), module=SETUP.stem))
        return seconds(command(str(marked)), Path(folder))


def plain(setup: str) -> list[str]:
    return [sys.executable, "-c", PLAIN, setup]


def ours(setup: str) -> list[str]:
    return [sys.executable, "-m", "async_grpo.cli", "train", setup, "-n", str(WORKERS), "--eval-every", "0"]


def measured(rounds: int) -> list[Row]:
    pairs = [(in_a_new_folder(plain), in_a_new_folder(ours)) for _ in range(rounds + 1)][1:]
    theirs, own = zip(*pairs)
    return [
        row("plain TRL: from the command to the end of the first optimizer step", theirs, "s"),
        row(f"a server and {WORKERS} workers: the same", own, "s"),
        row("the second, by the first", [mine / other for other, mine in pairs], "×", target="<= 1.6"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    load = os.getloadavg()
    rows = measured(1 if options.quick else ROUNDS)
    print(as_text(rows))
    if options.json:
        write_json(options.json, rows, load_before=load)


if __name__ == "__main__":
    main()
