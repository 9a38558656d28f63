"""What the audit says of turn rewards: their figures, and groups whose rewards are not as many as their turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_grpo.archive.audit import Audit, audit
from async_grpo.cli import main
from kit.archived_run import ArchivedRun


def turns(counts: list[int], rewards: list[float], mask: list[int] | None = None) -> dict[str, Any]:
    """The turns of a group with two completions, the first of three tokens and the second of one."""
    return {
        "completion_lengths": np.array([3, 1], np.int32),
        "completion_ids": np.array([5, 6, 7, 8], np.int32),
        "sampling_logprobs": np.full(4, -1, np.float32),
        "tool_mask": None if mask is None else np.array(mask, np.uint8),
        "turn_counts": np.array(counts, np.int32),
        "turn_rewards": np.array(rewards, np.float32),
    }


def judged(run: ArchivedRun) -> Audit:
    return audit(run.root, sleep=lambda seconds: None)


def test_the_figures_of_turn_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], **turns([2, 1], [0.25, np.nan, 0.5], mask=[1, 0, 1, 1]))
    run.use(2, [1], **turns([1, 1], [np.inf, 1.0]))
    assert main(["audit", str(run.root)]) == 0
    assert "turn rewards         3 for 5 turns, 0.583 on average\n" in capsys.readouterr().out
    run.use(3, [2])
    assert main(["audit", str(run.root)]) == 0
    assert "0.583 on average; 1 group without\n" in capsys.readouterr().out
    assert main(["audit", str(run.root), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["turn_rewards"] == {"turns": 5, "rewarded": 3, "total": 1.75}
    each = [group["turn_rewards"] for group in data["groups"]]
    assert each == [{"turns": 3, "rewarded": 2, "total": 0.75}, {"turns": 2, "rewarded": 1, "total": 1.0}, None]


def test_a_run_without_turn_rewards_says_nothing_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0])
    assert main(["audit", str(run.root)]) == 0
    assert "turn rewards" not in capsys.readouterr().out
    assert judged(run).as_json()["turn_rewards"] is None


@pytest.mark.parametrize(
    ("counts", "rewards", "mask", "found"),
    [
        ([1, 1], [0, 0], [1, 0, 1, 1], "completion 0 has 1 turn reward, and its tokens have 2 turns"),
        ([1, 2], [0, 0, 0], [1, 1, 0, 1], "completion 1 has 2 turn rewards, and its tokens have 1 turn"),
        ([2, 1], [0, 0, 0], None, "completion 0 has 2 turn rewards, and its tokens have 1 turn"),
        ([0, 1], [0], [0, 1, 1, 1], "completion 0 has no turn rewards, and its tokens have 1 turn"),
    ],
)
def test_as_many_turn_rewards_as_turns(
    counts: list[int], rewards: list[float], mask: list[int] | None, found: str, tmp_path: Path
) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], **turns([1, 1], [0, 0]))
    run.use(2, [1], **turns(counts, rewards, mask))
    assert judged(run).anomalies == [f"Group 1: {found}."]


def test_a_completion_of_an_environment_alone_has_no_turn(tmp_path: Path) -> None:
    run = ArchivedRun(tmp_path)
    run.use(1, [0], **turns([0, 1], [1], mask=[0, 0, 0, 1]))
    assert judged(run).anomalies == []
