"""PCGrad over several processes, on the CPU with gloo: the same gradients as in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kit.runs import SETUP, finish, logged
from kit.several_ranks import config_of, figures, same_training, same_weights

pytestmark = [pytest.mark.integration, pytest.mark.slow]

TASKS_SETUP = SETUP.with_name("several_tasks.py")
STEPS = 6
IN_PARTS = json.dumps({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2})


def trained(folder: Path, config: str, **env: str) -> Path:
    folder.mkdir()
    options = ("-n", "1", "--deterministic", "--steps", str(STEPS), "--accelerate-config", config)
    finish(folder, *options, setup=TASKS_SETUP, **env)
    return folder


def measured(folder: Path) -> list[float]:
    return [entry[name] for entry in logged(folder / "worker") for name in ("mtl/cosine_min", "actor/long_loss")]


@pytest.mark.parametrize(
    ("tasks", "env"),
    [
        pytest.param("2", {}, id="as many rows of each task on each rank"),
        pytest.param("3", {}, id="other tasks on each rank"),
        pytest.param("2", {"TEST_SHARDED": "1"}, id="sharded"),
        pytest.param("3", {"TEST_SHARDED": "1"}, id="sharded, other tasks on each rank"),
    ],
)
def test_two_ranks_train_as_one_process_does(tmp_path: Path, tasks: str, env: dict[str, str]) -> None:
    one = trained(tmp_path / "one", "none", TEST_TASKS=tasks)
    config = config_of("fsdp2.yaml" if env else "ddp.yaml", 2, tmp_path)
    two = trained(tmp_path / "two", str(config), TEST_TASKS=tasks, **env)
    same_training(two, one, steps=STEPS)
    assert measured(two) == pytest.approx(measured(one), abs=1e-4)
    assert min(measured(one)[::2]) < -0.1, "the tasks conflict"
    if not env:
        same_weights(two, one, 4)


def test_two_ranks_accumulate_as_they_train_at_once(tmp_path: Path) -> None:
    """Two micro-batches a step, each with its share of each task."""
    config = config_of("fsdp2.yaml", 2, tmp_path)
    whole = trained(tmp_path / "whole", str(config), TEST_SHARDED="1")
    parts = trained(tmp_path / "parts", str(config), TEST_SHARDED="1", TEST_GRPO=IN_PARTS)
    same_training(parts, whole, steps=STEPS, accumulates=True)
    assert [entry["grad_norm"] for entry in figures(parts).values()]
