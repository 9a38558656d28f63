"""When evaluations no longer improve: as transformers decides it, on a file that is being written."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import EarlyStoppingCallback

from async_grpo.evals import early_stopping


@pytest.mark.parametrize("threshold", [0.0, 0.3])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_early_stopping_is_that_of_transformers(patience: int, threshold: float) -> None:
    draw = random.Random(patience)
    for _ in range(50):
        values = [round(draw.random(), 1) for _ in range(12)]
        bests = [early_stopping.best_of(enumerate(values[: end + 1]), threshold) for end in range(12)]
        ours = next((end for end, best in enumerate(bests) if best.without >= patience), None)
        assert ours == stop_of_transformers(values, patience, threshold), values
        assert bests[-1].step == values.index(max(values))


def stop_of_transformers(values: list[float], patience: int, threshold: float) -> int | None:
    callback = EarlyStoppingCallback(patience, threshold)
    args = SimpleNamespace(metric_for_best_model="reward", greater_is_better=True)
    state, control = SimpleNamespace(best_metric=None), SimpleNamespace(should_training_stop=False)
    for at, value in enumerate(values):
        callback.on_evaluate(args, state, control, metrics={"eval_reward": value})
        if control.should_training_stop:
            return at
        state.best_metric = value if state.best_metric is None else max(value, state.best_metric)
    return None


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "evaluations.jsonl"
    watch = early_stopping.ImprovementWatch(file, 1, 0.0)
    assert watch.reason_to_stop() == ""
    lines = [json.dumps({"step": step, "figures": {"reward_mean": {"value": 0.5}}}) + "\n" for step in (0, 2)]
    file.write_text(lines[0] + lines[1][:30])
    assert watch.reason_to_stop() == "" and watch.look().step == 0
    file.write_text("".join(lines))
    assert watch.reason_to_stop() == (
        "1 evaluation has not improved the mean reward by more than 0: the best was 0.500 at step 0"
    )
    with file.open("a") as more:
        more.write(lines[1])
    assert watch.reason_to_stop().startswith("2 evaluations in a row have not improved")
