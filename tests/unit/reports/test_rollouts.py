"""`async-grpo rollouts` in the terminal, and what it writes as a page; the page in a browser: tests/browser."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.cli import main
from async_grpo.formatting import as_text, printable
from async_grpo.images import EncodedImage
from kit.archived_run import HOSTILE, ArchivedRun, three_steps

Said = pytest.CaptureFixture[str]


def shown(capsys: Said, *arguments: object) -> str:
    assert main(["rollouts", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys: Said, *arguments: object) -> str:
    assert main(["rollouts", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def data_of(page: Path) -> dict[str, Any]:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*)</script>', page.read_text())[1])


def page_of(run: ArchivedRun) -> Path:
    page = run.root.with_name("page.html")
    assert main(["rollouts", str(run.root), "--html", str(page)]) == 0
    return page


def test_the_newest_are_shown_with_everything(run: ArchivedRun, capsys: Said) -> None:
    text = shown(capsys, run.root, "--limit", 4)
    assert "group 5  step 3, staleness 1, dev2, policy 1" in text
    assert "prompt: question 5" in text and "answer: answer 5" in text
    assert "right 1  format 0.5" in text and "advantage +0.71" in text and "good reply 5" in text
    assert "group 4" in text and "group 3" not in text and "the newest 4" in text


def test_functions_of_one_name_are_told_apart(tmp_path: Path, capsys: Said) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], reward_names=("right", "right"))
    assert "right 1  right (2) 0.5" in shown(capsys, run.root)
    data = data_of(page_of(run))
    assert data["rewards"] == ["right", "right (2)"] and data["rows"][0][7:] == [1.0, 0.5]


def test_those_of_a_node(run: ArchivedRun, capsys: Said) -> None:
    run.use(4, [20, 21], node="gpu2")
    text = shown(capsys, run.root, "--node", "gpu2")
    assert "group 20" in text and "dev1 on gpu2" in text and "group 5" not in text
    assert "No group that is asked for was made on node 'gpu9'" in refused(capsys, run.root, "--node", "gpu9")
    assert main(["audit", str(run.root)]) in (0, 1)
    assert "gpu2: 2" in capsys.readouterr().out


def test_advantages_of_a_critic_are_not_shown(run: ArchivedRun, capsys: Said) -> None:
    run.run.hyperparameters.write_text(json.dumps({"advantages": "critic"}))
    text = shown(capsys, run.root)
    assert "group 5  step 3" in text and "advantage" not in text


@pytest.mark.parametrize("order", [[], ["--worst"], ["--best"]])
@pytest.mark.parametrize("state", ["stopped", "running"])
def test_what_no_step_used_comes_last_and_says_so(order: list[str], state: str, tmp_path: Path, capsys: Said) -> None:
    run = three_steps(tmp_path, state=state)
    run.line(dropped=7, reason="equal rewards")
    run.group(7, 3)
    text = shown(capsys, run.root, *order, "--limit", 100)
    groups = list(dict.fromkeys(re.findall(r"group (\d)  (\w+)", text)))
    assert [fate for _, fate in groups if fate in ("step", "dropped", "left")] == [fate for _, fate in groups]
    assert sorted(groups[:-1]) == [(str(seq), "step") for seq in range(6)] + [("7", "dropped")]
    assert groups[-1] == ("6", "left") and "left over when the run ended, not trained on, dev1, policy 3" in text


def test_one_token_is_singular_and_in_the_same_column(tmp_path: Path, capsys: Said) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], completion_lengths=np.array([1, 4], np.int32))
    assert sorted(re.findall(r" +\d tokens?(?= )", shown(capsys, run.root))) == ["      1 token", "     4 tokens"]


def test_the_worst_of_a_step_and_one_job_in_full(run: ArchivedRun, capsys: Said) -> None:
    run.group(3, 0, completions=["long\n" * 40 + "the end", "short"], extra_columns={"why": ["because", None]})
    worst = shown(capsys, run.root, "--step", 2, "--worst", "--limit", 1)
    assert "short" in worst and "1 of 4 completions" in worst
    assert "the end" not in shown(capsys, run.root, "--step", 2)
    whole = shown(capsys, run.root, "--job", "3")
    assert "the end" in whole and "why: because" in whole


def test_prompts_are_shown_as_the_completions_were_sampled(tmp_path: Path, capsys: Said) -> None:
    run = ArchivedRun(tmp_path)
    lengths = np.array([1, 0], np.int32)
    run.use(1, [0], prompts=["question 0, seen"])
    run.use(2, [1], prompts=["it rains", "it snows"], prompt_lengths=lengths)
    text = shown(capsys, run.root)
    assert "prompt: question 0, seen" in text and "answer: answer 0" in text
    assert "prompt: it rains" in text and "prompt: it snows" in text
    data = data_of(page_of(run))
    assert [about["prompt"] for about in data["groups"]] == ["question 1", "question 0, seen"]
    assert [row[5] for row in data["rows"]][:2] == [[["prompt", "it rains"]], [["prompt", "it snows"]]]
    assert main(["queue", str(run.root), "show", "1"]) == 0
    assert "prompt as sampled, of completion 2: it snows" in capsys.readouterr().out


def test_one_group_of_an_evaluation(run: ArchivedRun, capsys: Said) -> None:
    for seq in (9_000_000_000, 9_000_000_001):
        run.group(seq)
    for more in ([], ["--eval"]):
        text = shown(capsys, run.root, "--job", 9_000_000_000, *more)
        assert "group 9000000000" in text and "group 9000000001" not in text
        assert "no finished group 9000000002" in refused(capsys, run.root, "--job", 9_000_000_002, *more)


def test_what_is_not_there_is_a_sentence(run: ArchivedRun, tmp_path: Path, capsys: Said) -> None:
    assert "No group of step 9" in refused(capsys, run.root, "--step", 9)
    assert "no finished group 99" in refused(capsys, run.root, "--job", 99)
    assert "is not a run directory" in refused(capsys, tmp_path)
    aside = run.root / "quarantine" / "0000000008.a02_failed.safetensors"
    aside.write_bytes(b"")
    aside.with_suffix(".reason").write_text("ValueError: no answer\n")
    assert "ValueError: no answer" in refused(capsys, run.root, "--job", 8)
    assert "has no finished group yet" in refused(capsys, ArchivedRun(tmp_path / "new").root)


def test_a_damaged_file_is_left_out_and_named(run: ArchivedRun, capsys: Said) -> None:
    run.group(5).write_bytes(b"")
    text = shown(capsys, run.root)
    assert "group 4" in text and "left out: done/0000000/0000000005" in text


def test_turn_rewards_are_shown(tmp_path: Path, capsys: Said) -> None:
    run = ArchivedRun(tmp_path)
    counts, rewards = np.array([2, 1], np.int32), np.array([0.25, np.nan, 0.5], np.float32)
    run.use(1, [0], turn_counts=counts, turn_rewards=rewards)
    assert "turn rewards 0.25 none" in " ".join(shown(capsys, run.root).split())
    assert "turn rewards: 0.5" in shown(capsys, run.root, "--job", "0")
    run.use(2, [1], turn_counts=counts, turn_rewards=np.full(3, np.nan, np.float32))
    assert "turn rewards" not in shown(capsys, run.root, "--job", "1")


def test_a_dialogue_is_on_the_page_by_its_turns(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    calls = [{"type": "function", "function": {"name": "search", "arguments": {"query": "sea"}}}]
    asks = {"role": "assistant", "content": "", "tool_calls": calls}
    result = {"role": "tool", "name": "search", "content": HOSTILE}
    completions = [[asks, result, {"role": "assistant", "content": "four"}], [{"role": "assistant", "content": "no"}]]
    counts, rewards = np.array([2, 1], np.int32), np.array([0.25, np.nan, 0.0], np.float32)
    run.use(1, [0], completions=completions, turn_counts=counts, turn_rewards=rewards)
    (parts,) = data_of(page_of(run))["dialogues"].values()
    found = [(role, reward, side) for role, _, reward, side in parts]
    assert found == [("assistant", 0.25, 1), ("tool", None, 0), ("assistant", None, 0)]
    assert 'search({"query": "sea"})' in parts[0][1]


def test_hostile_text_steers_no_terminal(tmp_path: Path, capsys: Said) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], completions=[HOSTILE, "[bold red]x[/]"], prompt=HOSTILE)
    text = shown(capsys, run.root)
    assert "\x1b" not in text and "\x00" not in text and "\u202e" not in text
    assert "\\x1b[31m" in text and "[bold red]x[/]" in text


def test_messages_and_tool_calls_are_readable() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "see"}]},
    ]
    assert as_text(messages) == '[assistant]\n  → add({"a": 1})\n[tool add] 2\n[user] <image>see'
    assert printable("a\u200db\u00a0\u202e\n\x07") == "a\u200db\u00a0\\u202e\n\\x07"


def test_the_page_holds_the_rollouts_and_nothing_of_them_as_markup(run: ArchivedRun) -> None:
    run.use(4, [7], completions=[HOSTILE, "plain"], prompt=HOSTILE, reward_names=("<b>right</b>", "format"))
    page = page_of(run)
    text = page.read_text()
    assert text.isascii() or "owned" not in re.sub(r"[\x00-\x7f]", "", text)
    assert text.count("<script") == 2 and text.count("</script>") == 2 and 'onerror="document' not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    data = data_of(page)
    assert len(data["rows"]) == 16 and len(data["groups"]) == 8 and not data["newestOnly"]
    assert any("</script><script>document.title" in row[4] for row in data["rows"])
    assert page.stat().st_mode & 0o777 == 0o600


def test_images_are_named_on_the_screen_and_shown_on_the_page(tmp_path: Path, capsys: Said) -> None:
    png, svg, large = b"\x89PNG...", b"<svg onload=alert(1)>", b"\xff\xd8\xff" + bytes(3_000_000)
    looked = [{"role": "tool", "content": [{"type": "image", "image": EncodedImage(b"GIF89a")}]}]
    run = ArchivedRun(tmp_path)
    parts = [{"type": "image", "image": EncodedImage(data)} for data in (png, svg, large, png)]
    prompt = [{"role": "user", "content": [*parts, {"type": "text", "text": "see"}]}]
    run.use(1, [0], completions=["a", looked], prompt=prompt)
    screen = shown(capsys, run.root)
    assert "[user] <image><image><image><image>see" in screen and "[tool] <image>" in screen
    data = data_of(page_of(run))
    assert data["groups"][0]["images"] == ["data:image/png;base64," + b64encode(png).decode()]
    assert sorted(row[6] for row in data["rows"]) == [[], ["data:image/gif;base64," + b64encode(b"GIF89a").decode()]]


def test_a_page_of_the_newest_says_so_and_replaces_only_its_own_kind(
    run: ArchivedRun, tmp_path: Path, capsys: Said
) -> None:
    page = tmp_path / "page.html"
    assert "only the newest 3 are in it" in shown(capsys, run.root, "--html", page, "--limit", 3)
    assert data_of(page)["newestOnly"]
    shown(capsys, run.root, "--html", page)
    assert len(data_of(page)["rows"]) == 14
    page.write_text("mine")
    assert "is not a page of rollouts" in refused(capsys, run.root, "--html", page)
    assert page.read_text() == "mine"
    assert "cannot be written" in refused(capsys, run.root, "--html", tmp_path / "nowhere" / "page.html")
