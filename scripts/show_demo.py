"""Run the demo and print the part of its output that is in the README: some steps and evaluations, and the end.

python scripts/show_demo.py            print it
python scripts/show_demo.py --write    put it into the README
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from async_grpo.launch.screen import fitting  # noqa: E402  # src is on the path now

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- the demo's output: .*? -->\n```console\n).*?(\n```)", re.DOTALL)
STEP = re.compile(r"[\d:]+ step ")
WIDTH = 84  # columns: what the site shows of a line
DEMO = ("src/app/trainer_setup_tiny.py", "--distributed", "--num-workers", "2", "--eval-every", "25")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the part of the demo's output that is in the README.")
    parser.add_argument("--write", action="store_true", help="put it into the README")
    write = parser.parse_args().write
    shown = excerpt(output())
    if not write:
        print(shown)
        return
    text, found = BLOCK.subn(lambda match: match[1] + shown + match[2], README.read_text())
    if found != 1:
        sys.exit(f"{README} has {found} places for the demo's output; there must be one.")
    README.write_text(text)


def output() -> str:
    """What the demo prints, as if it had been started in the checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "src" / "cli" / "train.py"), str(ROOT / DEMO[0]), *DEMO[1:]]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(run.stdout + run.stderr)
        text = run.stdout.replace(f"{folder}/", "")
    return re.sub(r"\S*/async-grpo ", ".venv/bin/async-grpo ", text)


def excerpt(text: str) -> str:
    """The first line, three steps, the first and the last evaluation, and the end."""
    lines = text.splitlines()
    steps = [number for number, line in enumerate(lines) if STEP.match(line)]
    evaluations = [number for number, line in enumerate(lines) if re.search("evaluation of version .*success", line)]
    end = next(number for number, line in enumerate(lines) if re.match(r"run \w+ finished", line))
    shown = sorted({0, steps[0], steps[len(steps) // 2], steps[-1], evaluations[0], evaluations[-1]})
    return "\n".join([narrow(lines[number]) for number in shown] + lines[end:])


def narrow(line: str) -> str:
    """As in a terminal of `WIDTH` columns; of an evaluation its first figure."""
    return fitting(line, WIDTH) if STEP.match(line) else line.partition(", pass@")[0]


if __name__ == "__main__":
    main()
