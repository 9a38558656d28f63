"""Make a tiny run and show its directory at each stage: the listings of docs/file_lifecycle_documentation.md.

    python scripts/show_run_directory.py           print them
    python scripts/show_run_directory.py --write   put them into the page

The run has two workers, a prompt whose reward always fails, a stop in the middle, and is continued with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from stat import filemode

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "file_lifecycle_documentation.md"
SETUP = ROOT / "tests" / "kit" / "setups" / "random_model.py"
SHOWN_AS = "/home/you/project"  # instead of the temporary folder
SHOWN = 9  # files of a folder
DEADLINE_S = 240.0
STATES = ("_pending", "_processing_by", "_complete_from")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a tiny run and show its directory at each stage.")
    parser.add_argument("--write", action="store_true", help=f"replace the listings in {PAGE.name}")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        listings = {name: shown(text, home) for name, text in stages(home)}
    if write:
        PAGE.write_text(filled(PAGE.read_text(), listings))
    else:
        for name, text in listings.items():
            print(f"--- {name}\n{text}")


def shown(text: str, home: Path) -> str:
    """`text` without the paths of this machine."""
    packages = re.sub(r'"[^"\n]*/site-packages/', '"/home/you/.venv/lib/python3.11/site-packages/', text)
    return packages.replace(str(home), SHOWN_AS).replace(str(ROOT), "/home/you/async-grpo")


def stages(home: Path) -> Iterator[tuple[str, str]]:
    """The names of the listings and their texts, in the order of the run."""
    (home / "my_trainer.py").write_bytes(SETUP.read_bytes())
    run_dir, checkpoints = home / "worker", home / "checkpoints"

    process = train(home, "--steps", "100000")
    wait_for(lambda: (checkpoints / "checkpoint-8" / "rollout_state.json").exists(), process)
    wait_for(lambda: list((run_dir / "quarantine").glob("*.reason")), process)
    queue = wait_for(lambda: every_state(run_dir / "queue"), process)
    yield "live", listing(run_dir, replaced={"queue": queue})
    yield "handle", head(run_dir / "ps_ipc_handle_version.json")
    process.send_signal(signal.SIGTERM)
    ended(process)
    yield "stopped", listing(run_dir)
    yield "run", record(run_dir / "run.json")
    last = max(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    yield "checkpoint", listing(last)
    yield "rollout_state", json.dumps(json.loads((last / "rollout_state.json").read_text()))

    step = int(last.name.split("-")[1])
    ended(train(home, "--steps", str(step + 12), "--resume"))
    yield "finished", listing(run_dir)
    yield "quarantine", head(next((run_dir / "quarantine").glob("*.reason")), lines=100)
    lines = (run_dir / "consumed.jsonl").read_text().splitlines()
    resumed = max(number for number, line in enumerate(lines) if "resumed_from" in line)
    yield "consumed", "\n".join([*lines[:3], "...", *lines[resumed : resumed + 2]])
    yield "summary", head(run_dir / "summary.json", lines=100)

    ended(train(home, "--steps", "1"))
    yield "aside", "\n".join(sorted(f"{path.name}/" for path in home.iterdir() if path.is_dir()))


def record(path: Path) -> str:
    """The JSON object in a file, with one setting in place of all of them."""
    data = json.loads(path.read_text())
    data["plan"]["training"] = {"steps": data["plan"]["training"]["steps"], "...": "all others"}
    data["plan"] |= {"work": "the settings of the workers", "launch": "the settings of the launcher"}
    return json.dumps(data, indent=2)


def train(home: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "async_grpo.cli", "train", "my_trainer.py", "-n", "2", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TEST_REWARD": "poison", "OMP_NUM_THREADS": "1"}
    with (home / "output.txt").open("wb") as output:
        return subprocess.Popen(command, cwd=home, env=env, stdout=output, stderr=output)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> object:
    deadline = time.monotonic() + DEADLINE_S
    while not (result := condition()):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            sys.exit("The run ended or hung before the stage that was waited for.")
        time.sleep(0.002)
    return result


def ended(process: subprocess.Popen[bytes]) -> None:
    if process.wait(timeout=DEADLINE_S) != 0:
        sys.exit(f"The run failed with exit code {process.returncode}.")


def every_state(queue: Path) -> list[str]:
    """The lines of a listing of `queue`, if there is a job in every state."""
    try:
        lines = [line_of(path, f"queue/{path.name}") for path in sorted(queue.iterdir())]
    except FileNotFoundError:
        return []
    return lines if all(any(state in line for line in lines) for state in STATES) else []


def listing(folder: Path, replaced: dict[str, object] | None = None) -> str:
    """Mode, bytes and name of everything in `folder`; of many files the first few."""
    lines: list[str] = []
    for path in sorted(folder.iterdir()):
        lines.append(line_of(path, path.name + "/" * path.is_dir()))
        if path.is_dir():
            within = (replaced or {}).get(path.name) or [
                line_of(inner, str(inner.relative_to(folder)))
                for inner in sorted(path.rglob("*"))
                if not inner.is_dir() and not inner.name.startswith("events.")
            ]
            assert isinstance(within, list)
            lines += [f"  {line}" for line in within[:SHOWN]]
            lines += [f"  ... {len(within) - SHOWN} more"] if len(within) > SHOWN else []
    return "\n".join(lines)


def line_of(path: Path, name: str) -> str:
    status = path.lstat()
    size = "" if path.is_dir() else f"{status.st_size:,}"
    return f"{filemode(status.st_mode)} {size:>10}  {name}"


def head(path: Path, lines: int = 20) -> str:
    return "\n".join(path.read_text().splitlines()[:lines]).rstrip()


def _with(text: str, block: re.Match[str]) -> str:
    return block[1] + text + block[2]


def filled(page: str, listings: dict[str, str]) -> str:
    """The page with each block after `<!-- listing: NAME -->` replaced."""
    for name, text in listings.items():
        pattern = rf"(<!-- listing: {name} -->\n```\w*\n).*?(\n```)"
        page, found = re.subn(pattern, partial(_with, text), page, flags=re.DOTALL)
        if found != 1:
            sys.exit(f"{PAGE} has {found} places for the listing {name!r}; there must be one.")
    return page


if __name__ == "__main__":
    main()
