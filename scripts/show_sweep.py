"""Runs the demo on four seeds and puts its output and its picture into docs/sweeps.md.

python scripts/show_sweep.py --write
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.table import describe_machine, machine_line, update_docs  # noqa: E402  # needs the path above

COMMAND = (
    *("sweep", "src/app/trainer_setup_tiny.py", "--seeds", "42,1337,2024,9999", "--num-instances", "2"),
    *("--eval-every", "20"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="change the page; else only print")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "src" / "app", Path(folder) / "src" / "app")
        said = run(Path(folder))
        text = shown(said, folder)
        print(text)
        if options.write:
            update_docs("sweep demo", text)
            shutil.copy(
                Path(folder) / "outputs" / "sweep_tiny" / "agreement.png", ROOT / "docs" / "images" / "sweep.png"
            )


def run(folder: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "-m", "async_grpo.cli", *COMMAND],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        sys.exit(ran.stdout + ran.stderr)
    return ran.stdout


def shown(said: str, folder: str) -> str:
    lines = said.replace(f"{folder}/", "").splitlines()
    table = [line for line in lines if line.startswith(("|", "n ="))]
    progress = [re.sub(r" \(pid \d+\)", "", line) for line in lines if line.startswith("[sweep]")]
    console = [f"    {line}" for line in (f"$ async-grpo {' '.join(COMMAND)}", *progress)]
    machine = machine_line(describe_machine())
    return "\n".join(
        [
            "The command and its output without a terminal:",
            "",
            *console,
            "",
            f"{table[0]} Success rate:",
            "",
            *table[1:],
            "",
            f"{machine}.",
        ]
    )


if __name__ == "__main__":
    main()
