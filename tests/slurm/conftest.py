"""A job of the script of six tasks that two tasks and a CPU are enough for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from kit.runs import ROOT
from kit.verl_files import write_model_and_tasks


class SmallJob(NamedTuple):
    """What is said to `multinode_mtl.sh`."""

    keys: tuple[str, ...]
    env: dict[str, str]
    output: Path  # its checkpoints


@pytest.fixture
def small_job(tmp_path: Path) -> SmallJob:
    files = write_model_and_tasks(tmp_path)
    keys = (
        *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "mtl.num_tasks_expected=2"),
        *("data.max_response_length=3", "trainer.save_freq=10", f"trainer.default_local_dir={tmp_path / 'out'}"),
        *("trainer.total_training_steps=60", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"),
    )
    env = {"PYTHON": sys.executable, "TRAIN_FILES": str(files), "BASE_MODEL": str(tmp_path / "model")}
    env |= {"SHARED_DATA_PATH": "/data", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return SmallJob(keys, env, tmp_path / "out")
