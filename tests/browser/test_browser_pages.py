"""TensorBoard on a run's board, and the page of rollouts, as a person sees them in a browser."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.cli import main
from async_grpo.rundir.locks import server_lock
from kit.archived_run import HOSTILE, ArchivedRun, three_steps
from kit.waiting import until

DEADLINE_S = 120.0


class Served:
    """`async-grpo board --serve` on a free port."""

    def __init__(self, root: Path, output: Path) -> None:
        self._output = output
        with output.open("wb") as file:
            command = [sys.executable, "-m", "async_grpo.cli", "board", str(root), "--serve", "--port", "0"]
            self.process = subprocess.Popen(command, stdout=file, stderr=file)

    def said(self, pattern: str) -> str:
        """Wait until it prints something that matches."""
        return until(lambda: re.search(pattern, self.text), pattern, process=self.process, said=lambda: self.text)[0]

    @property
    def text(self) -> str:
        return self._output.read_text()


@contextmanager
def serve(root: Path, output: Path) -> Iterator[Served]:
    served = Served(root, output)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
        served.process.wait()


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_tensorboard_shows_the_reward_of_a_live_run_and_ends_with_ctrl_c(browser: Any, tmp_path: Path) -> None:
    run = three_steps(tmp_path, state="running")
    server = server_lock(run.run.root)
    assert server.try_acquire({"role": "parameter server"})
    with serve(run.root, tmp_path / "output.txt") as served:
        url = served.said(r"http://127\.0\.0\.1:\d+/")
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(f"{url}#scalars&tagFilter=1_rewards%2Ftotal%24")
        page.get_by_text("tag: 1_rewards/total").first.wait_for(timeout=DEADLINE_S * 1000)
        page.screenshot(path=tmp_path / "board.png")
        assert (tmp_path / "board.png").stat().st_size > 10_000

        run.use(4, [6])
        served.said("added 1 step and 1 logged line")
        tags = f"{url}data/plugin/scalars/tags"
        assert "1_rewards/total" in page.request.get(tags).json()["run"]
        points = f"{url}data/plugin/scalars/scalars?run=run&tag=1_rewards%2Ftotal"
        until(lambda: [it[1] for it in page.request.get(points).json()] == [1, 2, 3, 4], "fourth step in TensorBoard")
        page.close()

        server.release()
        served.said("the run has ended")
        helpers = children(served.process.pid)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=DEADLINE_S) == 0
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in helpers), "end of its helpers")


class Page:
    """The page of a run's rollouts, opened; what it asks for and complains of is kept."""

    def __init__(self, browser: Any, run: ArchivedRun, folder: Path, *options: str, **context: Any) -> None:
        self.file = folder / "page.html"
        assert main(["rollouts", str(run.root), "--html", str(self.file), *options]) == 0
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._context = browser.new_context(**context)
        self.page = self._context.new_page()
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.file.as_uri())

    def counts(self, text: str) -> None:
        """Wait until the page says this many completions."""
        self.page.wait_for_function(
            "text => document.getElementById('count').textContent.startsWith(text)", arg=text, timeout=DEADLINE_S * 1000
        )

    def close(self) -> None:
        """Nothing went wrong, and nothing was asked of anybody."""
        assert self.complaints == []
        assert self.requests == [self.file.as_uri()]
        self._context.close()


@pytest.fixture
def run(tmp_path: Path) -> ArchivedRun:
    run = three_steps(tmp_path)
    run.use(4, [7], rewards=((0.25, 0.0), (math.nan, 0.0)), completions=["unique words", "x"])
    return run


def test_the_page_of_evaluations_is_by_version(browser: Any, run: ArchivedRun, tmp_path: Path) -> None:
    run.group(9_000_000_000, 0, rewards=((1.0, 0.0), (0.0, 0.0)))
    run.group(9_000_000_001, 25, rewards=((1.0, 0.0), (1.0, 0.0)))
    opened = Page(browser, run, tmp_path, "--eval")
    page = opened.page
    assert "Mean reward by evaluated version" in page.inner_text("#plot-title")
    page.focus("#plot")
    page.keyboard.press("ArrowLeft")
    assert "version 25: mean 1" in page.inner_text("#plot-text")
    page.keyboard.press("Enter")
    opened.counts("2 of 4")
    opened.close()


def test_filters_find_what_is_asked_for(browser: Any, run: ArchivedRun, tmp_path: Path) -> None:
    opened = Page(browser, run, tmp_path)
    page = opened.page
    opened.counts("16 of 16 completions")
    assert page.locator("article").count() == 16
    page.keyboard.press("/")
    page.keyboard.type("UNIQUE")
    page.locator("mark", has_text=re.compile("^unique$")).wait_for()
    opened.counts("1 of 16")
    page.keyboard.press("Escape")
    opened.counts("16 of 16")
    for steps, expected in ((("#low", "1.5"), "7 of 16"), (("#first", "3"), "2 of 16"), (("#last", "2"), "0 of 16")):
        page.fill(*steps)
        opened.counts(expected)
    page.click("#reset")
    opened.counts("16 of 16")
    for chosen, expected in ((("#worker", "dev2"), "8"), (("#version", "0"), "4"), (("#which", "best"), "2")):
        page.select_option(*chosen)
        opened.counts(f"{expected} of 16")
    page.click("#reset")
    assert not page.locator("#more").is_visible(), "everything is shown"
    for order in ("newest", "oldest", "best"):  # what no step was trained on is the last, and marked
        page.select_option("#order", order)
        opened.counts("16 of 16")
        assert page.locator(".unused").count() == 1
        assert "left over: not trained on" in page.locator(".group").last.inner_text()
    page.click("#reset")
    page.select_option("#reward", label="right")
    page.select_option("#order", "worst")
    page.wait_for_function("() => document.querySelector('article').innerText.startsWith('0.5')")
    assert "Mean reward by optimizer step (right)" in page.inner_text("#plot-title")
    opened.close()


def test_the_keyboard_is_enough(browser: Any, run: ArchivedRun, tmp_path: Path) -> None:
    opened = Page(browser, run, tmp_path)
    page = opened.page
    opened.counts("16 of 16")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("[...document.querySelectorAll('article')].indexOf(document.activeElement)") == 1
    page.focus("#plot")
    page.keyboard.press("ArrowLeft")
    assert "step 4: mean 0.125" in page.inner_text("#plot-text")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    opened.counts("4 of 16")
    assert page.input_value("#first") == page.input_value("#last") == "3"
    opened.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Any, run: ArchivedRun, tmp_path: Path, scheme: str) -> None:
    run.use(5, [8], completions=["word" * 500, "line\n" * 100])
    phone = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
    opened = Page(browser, run, tmp_path, **phone, color_scheme=scheme)
    page = opened.page
    opened.counts("18 of 18")
    assert not page.locator("#form").is_visible()
    page.tap("summary")
    assert page.locator("#form").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    folded = page.locator("article .folded").first
    height = folded.bounding_box()["height"]
    page.locator("article .fold").first.tap()
    assert page.locator("article").filter(has=page.get_by_text("Show less")).bounding_box()["height"] > height
    opened.close()


def test_hostile_text_is_only_text(browser: Any, tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    texts = {"prompt": HOSTILE, "completions": [HOSTILE, [{"role": HOSTILE, "content": HOSTILE}]]}
    run.use(1, [0], **texts, reward_names=(HOSTILE, "format"), extra_columns={HOSTILE: [HOSTILE, None]})
    run.line(dropped=1, reason=HOSTILE)
    run.group(1)
    opened = Page(browser, run, tmp_path)
    page = opened.page
    opened.counts("4 of 4")
    assert page.title() == "Rollouts"
    assert page.evaluate("document.scripts.length") == 2 and page.locator("img").count() == 0
    shown = page.locator("article pre").nth(0).inner_text()
    assert "</script><script>document.title='owned'</script>" in shown
    assert "\\x00" in shown and "\\ud800" in shown and "\u202e" not in shown and "{{data}}" in shown
    page.fill("#search", "<img src=x")
    opened.counts("2 of 4")
    opened.close()


def test_the_page_may_load_and_run_nothing_else(browser: Any, run: ArchivedRun, tmp_path: Path) -> None:
    opened = Page(browser, run, tmp_path)
    violated = opened.page.evaluate(
        """async () => {
          const seen = [];
          document.addEventListener("securitypolicyviolation", (event) => seen.push(event.effectiveDirective));
          const script = document.createElement("script");
          script.textContent = "document.title = 'owned'";
          const image = document.createElement("img");
          image.src = "http://127.0.0.1:9/x.png";
          document.body.append(script, image);
          await fetch("http://127.0.0.1:9/").catch(() => {});
          while (seen.length < 3) await new Promise((resolve) => setTimeout(resolve, 20));
          return seen.sort();
        }"""
    )
    assert violated == ["connect-src", "img-src", "script-src-elem"]
    assert opened.page.title() == "Rollouts"


def test_ten_thousand_completions_are_drawn_a_page_at_a_time(browser: Any, tmp_path: Path) -> None:
    run = three_steps(tmp_path)
    opened = Page(browser, run, tmp_path)
    data = json.loads(opened.page.evaluate("document.getElementById('data').textContent"))
    opened.close()
    group, _, *between, _, extras, images, right, form = data["rows"][0]
    words = "word " * 100
    data["rows"] = [
        [group, index / 10_000, *between, f"reply {index} {words}", extras, images, right, form]
        for index in range(10_000)
    ]
    text = opened.file.read_text()
    begin, end = text.index('id="data">') + len('id="data">'), text.index("</script>")
    opened.file.write_text(text[:begin] + json.dumps(data) + text[end:])
    page = browser.new_page()
    page.goto(opened.file.as_uri())
    assert page.inner_text("#count").startswith("10,000 of 10,000")
    assert page.locator("article").count() == 40
    page.click("#more")
    assert page.locator("article").count() == 80
    page.fill("#search", "reply 9999 ")
    page.wait_for_function("() => document.getElementById('count').textContent.startsWith('1 of 10,000')")
    page.close()


def test_a_dialogue_is_shown_by_its_turns(browser: Any, run: ArchivedRun, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "sea"}}}
    dialogue = [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "search", "content": "The sea of <b>Quim</b>."},
        {"role": "assistant", "content": "Quim"},
    ]
    counts, rewards = np.array([2, 1], np.int32), np.array([0.5, 0.0, 0.0], np.float32)
    completions = [dialogue, [{"role": "assistant", "content": "no"}]]
    run.use(5, [8], completions=completions, turn_counts=counts, turn_rewards=rewards)
    opened = Page(browser, run, tmp_path)
    page = opened.page
    parts = page.locator("details.part")
    summaries = ["turn 1 0.5", "[tool search] The sea of <b>Quim</b>.", "turn 2 0"]
    assert parts.locator("summary").all_inner_texts() == summaries
    assert [parts.nth(at).locator("pre").is_visible() for at in range(3)] == [True, False, True]
    parts.nth(1).locator("summary").click()
    assert parts.nth(1).locator("pre").is_visible()
    assert page.locator("details.part.more").count() == 1
    opened.close()
