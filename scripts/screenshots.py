"""The screenshots of the docs, of real runs of the demo: `python scripts/screenshots.py`.

Runs the demo three times in a folder of its own (about three minutes), looks at one of them with `status` while it
trains, opens the board and the page of rollouts in the Chromium of this machine, and writes status.png, board.png,
hparams.png and rollouts.png of docs/images.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000
COLUMNS = 96  # of the terminal
LOOK_AT_STEP = 60
LOOK_WITHIN_S = 300.0
START_WITHIN_S = END_WITHIN_S = 60.0
COMMAND = [sys.executable, "-m", "async_grpo.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
WITHOUT_PATH = """(about, folder) => { about.textContent = about.textContent.replace(folder + "/", ""); }"""
OTHER_RUN = ["--run-dir", "worker2", "--steps", "60", "--max-staleness", "2", "--correction", "decoupled"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo = ["train", str(ROOT / "src/app/trainer_setup_tiny.py"), "--num-workers", "2"]
        for options in ([], OTHER_RUN):
            subprocess.run([*COMMAND, *demo, *options], cwd=folder, env=ENVIRONMENT, check=True)
        subprocess.run([*COMMAND, "rollouts", "--html", "page.html"], cwd=folder, env=ENVIRONMENT, check=True)
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=as_root)
        photograph_status(browser, folder)
        photograph_rollouts(browser, Path(folder) / "page.html")
        photograph_board(browser, folder)
        browser.close()


def photograph_status(browser: Any, folder: str) -> None:
    """A terminal with `async-grpo status`, in the middle of a run."""
    demo = ["train", str(ROOT / "src/app/trainer_setup_tiny.py"), "--num-workers", "2", "--run-dir", "live"]
    run = subprocess.Popen([*COMMAND, *demo, "--quiet"], cwd=folder, env=ENVIRONMENT)
    try:
        deadline = time.monotonic() + LOOK_WITHIN_S
        while (json.loads(status(folder, "--json") or "{}").get("step") or 0) < LOOK_AT_STEP:
            assert run.poll() is None, f"the demo ended ({run.returncode}) before step {LOOK_AT_STEP}"
            assert time.monotonic() < deadline, f"the demo did not reach step {LOOK_AT_STEP} in {LOOK_WITHIN_S:g} s"
            time.sleep(0.5)
        text = status(folder, FORCE_COLOR="1", COLUMNS=str(COLUMNS)).replace(f"{folder}/", "")
    finally:
        run.send_signal(signal.SIGINT)
        run.wait(END_WITHIN_S)
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text("$ async-grpo status live"), Text.from_ansi(text), sep="\n")
    page = browser.new_page(viewport={"width": 1100, "height": 700})
    picture = re.sub(r"@font-face {.*?}", "", console.export_svg(title="while it trains"), flags=re.DOTALL)
    page.set_content(picture.replace("Fira Code", "DejaVu Sans Mono"))
    save(page.locator("svg"), "status.png")


def status(folder: str, *options: str, **environment: str) -> str:
    command = [*COMMAND, "status", "live", *options]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT | environment, stdout=subprocess.PIPE, text=True).stdout


def photograph_rollouts(browser: Any, file: Path) -> None:
    page = browser.new_page(viewport={"width": 1080, "height": 860})
    page.goto(file.as_uri())
    page.locator("#about").evaluate(WITHOUT_PATH, str(file.parent))
    for name, value in (("first", "12"), ("last", "14")):
        page.fill(f"#{name}", value)
    page.locator("#last").blur()
    page.wait_for_selector("#reset:visible")
    save(page, "rollouts.png")


def photograph_board(browser: Any, folder: str) -> None:
    """As it opens, for one run; and the settings of two, side by side."""
    with board(folder, "worker") as url:
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(url)
        page.get_by_text("1_rewards/total").first.wait_for()
        page.get_by_role("button", name="Close").or_(page.locator(".settings-pane button")).first.click()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(3000)  # its charts draw themselves with an animation
        save(page, "board.png")
    with board(folder, "worker", "worker2") as url:
        page = browser.new_page(viewport={"width": 1440, "height": 560})
        page.goto(f"{url}#hparams")
        page.get_by_text("decoupled").first.wait_for()
        page.wait_for_timeout(3000)
        save(page, "hparams.png")


@contextmanager
def board(folder: str, *runs: str) -> Iterator[str]:
    """The address of a TensorBoard on these runs."""
    command = [*COMMAND, "board", *runs, "--serve", "--port", "0"]
    served = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    too_late = threading.Timer(START_WITHIN_S, served.kill)
    too_late.start()
    try:
        assert served.stdout is not None
        url = next((found[0] for line in served.stdout if (found := re.search(r"http://\S+", line))), None)
        too_late.cancel()
        assert url is not None, f"no TensorBoard on {', '.join(runs)} after {START_WITHIN_S:g} s"
        yield url
    finally:
        too_late.cancel()
        served.terminate()
        served.wait(END_WITHIN_S)


def save(page: Any, name: str) -> None:
    path = IMAGES / name
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
