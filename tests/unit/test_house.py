"""The house holds no more than house.toml allows, and nobody raises a budget in silence."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "house.py"
DEADLINE_S = 120
REASON = "house: a room for what is new\n\nNothing could be removed: it is the first."

house = SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_nothing_is_above_its_budget() -> None:
    assert house.wrong(house.figures(ROOT), house.budgets_of((ROOT / "house.toml").read_text())) == []


@pytest.mark.parametrize(
    ("name", "count", "budget", "message"),
    [
        ("lines.a", 11, 10, "is 11, 1 above its budget. Remove as much there"),
        ("lines.a", 11, None, "is 11, 11 above its budget"),
        ("lines.a", 0, 11, "its budget is still 11: python scripts/house.py --lower"),
        ("lines.a", 1000, 1011, "its budget is still 1,011"),
        ("train.options", 60, 61, "its budget is still 61"),
        ("way.functions", 100, 183, "its budget is still 183: lower it in house.toml"),
    ],
)
def test_what_is_wrong(name: str, count: int, budget: int | None, message: str) -> None:
    (found,) = house.wrong({name: count}, {} if budget is None else {name: budget})
    assert found.startswith(name) and message in found


@pytest.mark.parametrize(("count", "budget"), [(10, 10), (0, 10), (2000, 2020)])
def test_what_is_not_wrong(count: int, budget: int) -> None:
    assert house.wrong({"lines.a": count}, {"lines.a": budget, "way.functions": 3, "trl.modules.a.py": 1}) == []


def test_a_room_that_is_gone_has_no_budget() -> None:
    (found,) = house.wrong({}, {"lines.a": 3})
    assert "lines.a has a budget, and is not there any more" in found


def test_budgets_are_lowered_and_none_is_raised() -> None:
    text = '# why\n[lines]  # of rooms\n"a" = 10  # of a\n"gone" = 3\n"b" = 10\n\n[way]\nfiles = 4\nfunctions = 9\n'
    lower = '# why\n[lines]  # of rooms\n"a" = 7  # of a\n"b" = 10\n\n[way]\nfiles = 3\nfunctions = 9\n'
    assert house.lowered(text, {"lines.a": 7, "lines.b": 12, "way.files": 3}) == lower


# --- In a repository ---------------------------------------------------------------------------------------


class Repository:
    """A small house, with a room of three lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("src/async_grpo/queue/names.py", '"""Names."""\n\n# why\nA = 1\nB = 2\n')
        self.write("tests/test_names.py", "assert True\n")
        self.write("docs/design.md", "<!-- route: x -->\n```text\nqueue/names.py  A\n```\n")
        self.write("pyproject.toml", '[[tool.importlinter.contracts]]\nignore_imports = ["a -> b"]\n')
        self.write("scripts/house.py", SCRIPT.read_text())
        self.budgets()

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def budgets(self, *, queue: int = 3, modules: str = '["a.py"]') -> None:
        self.write(
            "house.toml",
            f'[lines]\n"async_grpo/queue" = {queue}\n[sum]\nsrc = 3\ntests = 1\n[way]\nfiles = 1\nfunctions = 9\n'
            f"[train]\noptions = {house.options_of_train()}\n[contracts]\nexceptions = 1\n[trl]\nmodules = {modules}\n",
        )

    def git(self, *arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "init.defaultBranch=m"]
        subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, timeout=DEADLINE_S)

    def commit(self, message: str, **budgets: Any) -> None:
        if budgets:
            self.budgets(**budgets)
        self.git("add", "--all")
        self.git("commit", "--allow-empty", "-m", message)

    def gate(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.folder / "scripts" / "house.py"), *arguments]
        alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=alone)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.git("init")
    made.commit("the first")
    return made


def test_the_gate_prints_the_rooms_of_the_last_changes_and_lets_pass(repository: Repository) -> None:
    done = repository.gate()
    assert (done.returncode, done.stderr) == (0, "")
    assert "async_grpo/queue: 3 of 3 lines; changed: names.py\nsrc: 3 of 3 lines" in done.stdout


def test_a_saving_lowers_the_budget(repository: Repository) -> None:
    repository.write("src/async_grpo/queue/names.py", "A = 1\n")
    assert repository.gate("--lower").returncode == 0
    text = (repository.folder / "house.toml").read_text()
    assert '"async_grpo/queue" = 1\n' in text and "src = 1\n" in text and "functions = 9\n" in text
    repository.commit("Fewer names")
    assert repository.gate().returncode == 0


@pytest.mark.parametrize(
    ("message", "raised"),
    [
        ("Names for all", {"queue": 4}),
        ("house: names for all", {"modules": '["b.py"]'}),
        ("Names\n\nhouse: for all", {"queue": 4}),
    ],
)
def test_a_budget_raised_in_silence_is_found_later_too(
    repository: Repository, message: str, raised: dict[str, str | int]
) -> None:
    repository.commit(message, **raised)
    repository.commit("another")
    done = repository.gate()
    expected = "lines.async_grpo/queue is 4" if "queue" in raised else "trl.modules.b.py is 1"
    assert done.returncode == 1 and f"{expected} in house.toml, and no commit whose message begins" in done.stderr


@pytest.mark.parametrize(("then", "message"), [(3, "Lowered again"), (4, REASON)])
def test_a_budget_raised_in_silence_can_be_made_good(repository: Repository, then: int, message: str) -> None:
    repository.commit("More", queue=4)
    repository.commit(message, queue=then, modules='["a.py"] ')
    assert house.raised_in_silence(repository.folder) == []


def test_a_commit_that_cannot_be_read_allows_nothing(repository: Repository) -> None:
    repository.write("house.toml", "<<<<<<< a")
    repository.commit("A conflict")
    repository.commit("Merged", queue=3)
    assert "lines.async_grpo/queue is 3" in house.raised_in_silence(repository.folder)[0]
    repository.commit(REASON, modules='["a.py"] ')
    assert house.raised_in_silence(repository.folder) == []


def test_a_budget_raised_with_its_reason_is_let_pass_and_what_is_saved_then_stays_saved(repository: Repository) -> None:
    for queue, message in ((5, REASON), (4, "Fewer")):
        repository.commit(message, queue=queue)
        assert house.raised_in_silence(repository.folder) == []
    repository.commit("More", queue=5)
    (found,) = house.raised_in_silence(repository.folder)
    assert "raised it above 4" in found


def test_branches_may_save_and_raise_beside_one_another(repository: Repository) -> None:
    repository.git("checkout", "-b", "side")
    repository.commit(REASON, queue=5)
    repository.git("checkout", "-")
    before = (repository.folder / "house.toml").read_text()
    repository.write("house.toml", before.replace("functions = 9", "functions = 8"))
    repository.commit("A shorter way")
    repository.git("merge", "side", "-m", "Both")
    assert house.raised_in_silence(repository.folder) == []
    text = (repository.folder / "house.toml").read_text()
    assert "functions = 8" in text and '"async_grpo/queue" = 5' in text


def test_without_a_history_the_house_is_counted_all_the_same(tmp_path: Path) -> None:
    outside = Repository(tmp_path)
    outside.write("src/async_grpo/queue/codec.py", "C = 3\n")
    done = outside.gate()
    assert "Whether budgets were raised was not looked for" in done.stdout
    assert done.returncode == 1 and "lines.async_grpo/queue is 4" in done.stderr
