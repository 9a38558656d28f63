"""A job of the script of six tasks that two tasks and a CPU are enough for."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]


class SmallJob(NamedTuple):
    """What is said to `multinode_mtl.sh`."""

    keys: tuple[str, ...]
    env: dict[str, str]
    output: Path  # its checkpoints


@pytest.fixture
def small_job(tmp_path: Path) -> SmallJob:
    sys.path.insert(0, str(ROOT / "tests" / "kit" / "setups"))
    from random_model import get_trainer

    trainer = get_trainer()
    trainer.model.save_pretrained(tmp_path / "model")
    trainer.processing_class.save_pretrained(tmp_path / "model")
    files = {}
    for task, source in (("math", "math__sums"), ("logic", "simulation__sums")):
        files[task] = str(tmp_path / f"{task}.parquet")
        rows = [
            {"data_source": source, "prompt": f"{number % 10}+1=", "reward_model": {"ground_truth": "7"}}
            for number in range(160)
        ]
        pq.write_table(pa.Table.from_pylist(rows), files[task])
    keys = (
        *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "mtl.num_tasks_expected=2"),
        *("data.max_response_length=3", "trainer.save_freq=10", f"trainer.default_local_dir={tmp_path / 'out'}"),
        *("trainer.total_training_steps=60", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"),
    )
    env = {"PYTHON": sys.executable, "TRAIN_FILES": str(files), "BASE_MODEL": str(tmp_path / "model")}
    env |= {"SHARED_DATA_PATH": "/data", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    return SmallJob(keys, env, tmp_path / "out")
