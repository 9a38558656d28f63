"""What a benchmark prints as a figure, and what it does not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
STEADY, SHAKEN = [1.0, 1.02, 1.09], [1.0, 1.02, 1.13]


@pytest.fixture
def table() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT))
    from benchmarks import table

    yield table
    sys.path.remove(str(ROOT))


def test_a_row_whose_control_of_equal_work_moved_is_no_figure(table: Any) -> None:
    quiet = table.row("speed-up", [1.2, 1.3, 1.25], "x", target=">= 1.15", limit=1.44, controls=STEADY)
    assert quiet.ok is True and table.cells(quiet)[1] == "1.25 x"
    loud = table.row("speed-up", [1.2, 7.57, 1.25], "x", target=">= 1.15", limit=1.44, controls=SHAKEN)
    assert loud.ok is None
    assert table.cells(loud)[1] == "not measurable here" and "7.57" not in table.as_text([loud])
    assert loud.unmeasurable == "its control of equal work moved by 13%"
    assert "not measurable here" in table.as_markdown([loud])


@pytest.mark.parametrize(
    ("values", "target", "limit", "possible"),
    [
        ([1.5, 1.6, 1.5], ">= 1.15", 1.44, False),
        ([1.3, 1.6, 1.4], ">= 1.15", 1.44, True),  # the median counts
        ([0.3, 0.3, 0.3], "<= 0.6", 0.4, False),
        ([0.5, 0.5, 0.5], "<= 0.6", 0.4, True),
        ([1.5, 1.6, 1.5], "", 1.44, True),  # which direction is better is not known
    ],
)
def test_a_row_that_beats_its_own_limit_is_no_figure(
    table: Any, values: list[float], target: str, limit: float, possible: bool
) -> None:
    one = table.row("speed-up", values, "x", target=target, limit=limit, controls=STEADY)
    assert (one.unmeasurable == "") is possible


def test_the_page_of_figures_has_no_figure_of_such_a_row(table: Any) -> None:
    from benchmarks import to_docs

    row = {"name": "speed-up", "value": 7.57, "unit": "x", "spread": [1.0, 7.57, 8.0], "target": ">= 1.15"}
    assert "7.57" in to_docs.line(row)
    line = to_docs.line({**row, "unmeasurable": "its control of equal work moved by 13%"})
    assert "7.57" not in line and "not measurable here" in line


def test_each_round_of_a_contest_has_a_control_between_all_its_runs(
    table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import contests

    done: list[str] = []
    run = type("Run", (), {"step_s": 1.0, "step_cpu_s": 1.0})
    monkeypatch.setattr(contests, "run_side", lambda side, *_: done.append(side.name) or run)
    monkeypatch.setattr(contests, "control_s", lambda: done.append("control") or 1.0)
    for contest in contests.contests(quick=False).values():
        assert contest.rounds >= 5
    contest = contests.contests(quick=True)["even"]
    for repeat in range(contest.rounds):
        contest.round(tmp_path, repeat, contests.Progress(runs=10))
    sides = [side.name for side in contest.sides]
    assert done == ["control", sides[0], "control", sides[1], "control"] * 5
    assert len(contest.controls) == 15


def test_where_rewards_wait_the_control_is_a_step_of_trl(
    table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks import contests

    step_s = itertools.count(1)
    monkeypatch.setattr(
        contests, "run_side", lambda *_: type("Run", (), {"step_s": float(next(step_s)), "step_cpu_s": 0.1})
    )
    monkeypatch.setattr(contests, "control_s", lambda: 1.0)
    contest = contests.contests(quick=True)["slow"]
    for repeat in range(2):
        contest.round(tmp_path, repeat, contests.Progress(runs=10))
    assert contest.controls == contest.trl_step_s() == [1.0, 1.0 + len(contest.sides)]


def test_each_search_of_a_chain_needs_the_result_of_the_one_before(table: Any) -> None:
    from benchmarks.setups import chain

    first, rivers = chain.asked_chains()[0], chain.Rivers()
    rivers.reset(first)
    search = rivers.search
    asked = chain.question(first)
    for name, after in pairwise(first):
        assert name in asked and after not in asked, "what is asked next is in the last result alone"
        asked = search(name)
    assert first[-1] in asked and search(first[-1]) == chain.NOTHING


@pytest.mark.parametrize(
    ("searched", "earned"),
    [
        ([0, 1, 2], [0.25, 0.25, 0.25, 0.0]),
        ([0, 0, 1], [0.25, 0.0, 0.25, 0.0]),  # a passage that was found before earns nothing
        ([3], [0.0, 0.0]),
        ([], [0.0]),
    ],
)
def test_the_turns_that_a_chain_rewards(table: Any, searched: list[int], earned: list[float]) -> None:
    from benchmarks.setups import chain

    first, rivers, completion = chain.asked_chains()[0], chain.Rivers(), []
    rivers.reset(first)
    for at in searched:
        completion += [{"role": "assistant"}, {"role": "tool", "content": rivers.search(first[at])}]
    completion += [{"role": "assistant", "content": f"<answer>{first[-1]}</answer>"}]
    assert chain.links([completion]) == [earned]
    assert chain.called([completion]) == [sum(earned) / 0.75]
