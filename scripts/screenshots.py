"""The screenshots of docs/seeing.md, of a real run of the demo: `python scripts/screenshots.py`.

Runs the demo in a folder of its own (about a minute), opens its board and its page of rollouts in the Chromium of this
machine, and writes docs/images/board.png and docs/images/rollouts.png.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
MOST_BYTES = 200_000
COMMAND = [sys.executable, "-m", "async_grpo.cli"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
SHOWN = "^(rewards/total|staleness/(mean|job_age)|speed|timing/generation|workers/(reward|groups|tokens))"

WITHOUT_PATH = """(about, folder) => { about.textContent = about.textContent.replace(folder + "/", ""); }"""
HIDDEN = """elements => { for (const element of elements) element.style.visibility = "hidden"; }"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo = ["train", str(ROOT / "src/app/trainer_setup_tiny.py"), "--num-workers", "2"]
        subprocess.run([*COMMAND, *demo], cwd=folder, env=ENVIRONMENT, check=True)
        subprocess.run([*COMMAND, "rollouts", "--html", "page.html"], cwd=folder, env=ENVIRONMENT, check=True)
        as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=as_root)
        photograph_rollouts(browser, Path(folder) / "page.html")
        photograph_board(browser, folder)
        browser.close()


def photograph_rollouts(browser: Any, file: Path) -> None:
    page = browser.new_page(viewport={"width": 1080, "height": 860})
    page.goto(file.as_uri())
    page.locator("#about").evaluate(WITHOUT_PATH, str(file.parent))
    for name, value in (("first", "6"), ("last", "8")):
        page.fill(f"#{name}", value)
    page.locator("#last").blur()
    page.wait_for_selector("#reset:visible")
    save(page, "rollouts.png")


def photograph_board(browser: Any, folder: str) -> None:
    served = subprocess.Popen(
        [*COMMAND, "board", "--serve", "--port", "0"], cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert served.stdout is not None
        url = next(found[0] for line in served.stdout if (found := re.search(r"http://\S+", line)))
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        page.goto(f"{url}#scalars&tagFilter={quote(SHOWN)}")
        page.get_by_text("tag: workers/reward").first.wait_for()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(2000)  # its charts draw themselves with an animation
        page.locator("tf-wbr-string").evaluate_all(HIDDEN)  # the path of the folder
        save(page, "board.png")
    finally:
        served.terminate()
        served.wait()


def save(page: Any, name: str) -> None:
    path = IMAGES / name
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)
    assert path.stat().st_size < MOST_BYTES, f"{path} has {path.stat().st_size} bytes"
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
