"""`examples/trackers/send_board.py`: what it tells a tracker that has the calls of W&B and trackio."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.archived_run import RUN, three_steps
from kit.scripts import module_at

SCRIPT = Path(__file__).parents[3] / "examples" / "trackers" / "send_board.py"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_gets_curves_workers_samples_and_settings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = three_steps(tmp_path)
    run.run.hyperparameters.write_text(json.dumps({"trainer": {"learning_rate": 0.1}}))
    begun: dict[str, Any] = {}
    logged: list[tuple[int, dict[str, Any]]] = []
    client = SimpleNamespace(
        log=lambda row, step: logged.append((step, row)),
        Table=lambda columns, data: [dict(zip(columns, row, strict=True)) for row in data],
        finish=lambda: begun.update(finished=True),
    )
    client.init = lambda **given: begun.update(given)
    monkeypatch.setitem(sys.modules, name, client)
    module_at(SCRIPT).main([name, str(run.root), "--project", "sums", "--samples-every", "3"])
    assert begun["project"] == "sums" and begun["name"] == f"worker-{RUN}" and begun["finished"]
    assert begun["config"]["learning_rate"] == 0.1
    assert [step for step, _ in logged] == [1, 2, 3, 3]
    curves = logged[2][1]
    assert curves["1_rewards/total"] == 1.0 and curves["7_workers/reward/dev2"] == 1.0
    assert not any(math.isnan(value) for value in curves.values())
    worst, best = logged[3][1]["samples"]
    assert worst["completion"].startswith("bad reply") and best["completion"].startswith("good reply")
    assert best["prompt"].startswith("question") and best["which"] == "best"
