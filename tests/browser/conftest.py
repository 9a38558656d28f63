"""A headless Chromium of this machine, driven by playwright; without one these tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")  # Playwright keeps an event loop running, in which no other test could run one
def browser() -> Iterator[Any]:
    reason = None if CHROMIUM else "there is no Chromium (Debian: apt-get install chromium)"
    if reason is None and find_spec("playwright") is None:
        reason = "playwright is not installed"
    if reason is not None:
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has no sandbox for root
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=as_root)
        yield started
        started.close()
