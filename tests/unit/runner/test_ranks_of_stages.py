"""A training stage in two processes, which accelerate starts, on the CPU with gloo: the training of one process."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest
import torch
from experiment_yard import tree

from async_grpo_experiments.algorithms.rows import LabelledRow, Rows
from async_grpo_experiments.guidance.head import ValueHead
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.config_files import write_config
from async_grpo_experiments.runner.experiment import ranks_command, stage_command
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer

NAME = "QSharp_tiny_sums_r1.train"
pytestmark = [pytest.mark.slow, pytest.mark.integration]


def trained(root: Path, reference: str, processes: int) -> tuple[ValueHead, str]:
    """The head that a training in so many processes leaves, and what it printed."""
    config = checked(
        tree(
            models={"tiny": {"ref": reference}},
            algos={"QSharp": {"batch_size": 8, "lr": 1e-2, "epochs": 1}},
            training={"datasets": ["sums"], "micro_batch_size": 4, "gradient_checkpointing": False},
            system={"device": "cpu", "gpus_per_job": processes},
        )
    )
    graph = graph_of(config)
    root.mkdir()
    write_config(root, config, graph)
    draw = random.Random(0)
    rows = [
        LabelledRow(
            problem=number,
            group=number,
            prompt=(1, 2),
            prefix=(),
            continuation=tuple(draw.randrange(8) for _ in range(6)),
            label=float(number % 2),
        )
        for number in range(16)
    ]
    data = root / "jobs" / "QSharp_tiny_sums_r1" / "data"
    data.mkdir()
    Rows(tuple(rows)).save(data / "rows.arrow")
    folder = root / graph[NAME].folder
    token = states.token_of(states.begin(folder, states.MadeOf(inputs={}, keys={})))
    command = (
        stage_command(root, graph[NAME], token)
        if processes == 1
        else ranks_command(processes, root, graph[NAME], token)
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    manifest = states.manifest_of(folder)
    assert manifest is not None and not states.damage(folder, manifest)
    return ValueHead.load(folder / "head"), ran.stdout


def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    tokenizer = words_tokenizer([str(number) for number in range(8)])
    reference = save(tmp_path / "reference", small_transformer(tokenizer), tokenizer)
    one, _ = trained(tmp_path / "one", reference, 1)
    two, said = trained(tmp_path / "two", reference, 2)
    assert said.count("QSharp_tiny_sums_r1.train on the CPU") == 1
    before, after = one.state_dict(), two.state_dict()
    assert before.keys() == after.keys()
    assert max(float((before[name] - after[name]).abs().max()) for name in before) < 1e-4
    assert any(float(value.abs().max()) > 0 for value in before.values() if value.dtype == torch.float32)
