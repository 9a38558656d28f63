"""Why a seed failed is what its run has written, as far as it was written by this start."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sweep_yard import SweepYard

from async_grpo.rundir.paths import FAILED, RunDir, RunState
from async_grpo_experiments.sweeps.run_progress import Reason
from kit.plans import planned


@pytest.mark.parametrize("mode", ["async", "trl"])
def test_the_reason_is_the_run_s_own_and_of_this_start(yard: SweepYard, mode: str) -> None:
    [run] = yard.sweep(1, mode=mode).runs
    run.run_dir.mkdir(parents=True)

    def fails(why: str) -> None:
        if mode == "async":
            RunDir(run.run_dir).write_state(RunState(run_id="r", state=FAILED, plan=planned(), started="", why=why))
        else:
            progress: dict[str, Any] = {"state": "running", "step": 1, "total_steps": 5, "saved": 0, "why": why}
            (run.run_dir / "plain_trl.json").write_text(json.dumps(progress))

    reason = Reason(run)
    reason.begins()
    assert reason() == "", "it has not begun"
    fails("RuntimeError: the reward")
    assert reason() == "RuntimeError: the reward"
    reason.begins()
    assert reason() == "", "of the start before"
