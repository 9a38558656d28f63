"""Experiments of real stages: killed in their second round, they end as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("hydra", reason="`make test-experiments` makes an environment that has Hydra")

from transformers import Qwen3Config, Qwen3ForSequenceClassification

from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.runner.results import results
from async_grpo_experiments.slots.ledger import LEDGER, RUNNING, read
from async_grpo_experiments.worlds.enumerable import LETTERS
from async_grpo_experiments.worlds.star import star_tokenizer, train_reference
from async_grpo_experiments.worlds.tiny import endless_transformer, save, small_transformer, words_tokenizer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

DEADLINE_S = 1800.0
SMALL: dict[str, Any] = {"batch_size": 16, "num_workers": 0, "lr": 1e-3, "max_steps": 4}


class RealExperiment:
    """An experiment in a folder of its own, as a user starts it."""

    def __init__(self, folder: Path, reference: str, **keys: Any) -> None:
        self.folder = folder
        tree = {
            "experiment": {"name": "x"},
            "models": {"tiny": {"ref": reference}},
            "system": {"device": "cpu", "max_parallel_jobs": 2, "deterministic": True},
            "data_collection": {"max_examples": 12},
            "evaluation": {"num_samples": 2, "max_examples": 6, "etas": [0.3]},
            **keys,
        }
        (folder / "conf").mkdir()
        (folder / "conf" / "config.yaml").write_text(yaml.safe_dump(tree))

    @property
    def root(self) -> Path:
        (found,) = [path.parent for path in self.folder.glob(f"outputs/x/*/{LEDGER}")]
        return found

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "async_grpo.cli", "experiment", *arguments]
        return subprocess.Popen(command, cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def run(self, *arguments: str) -> int:
        return self.start(*arguments).wait(DEADLINE_S)

    def until(self, runner: subprocess.Popen[bytes], condition: Callable[[], Any]) -> Any:
        """The first true result of `condition`, while the runner lives."""
        deadline = time.monotonic() + DEADLINE_S
        while not (list(self.folder.glob(f"outputs/x/*/{LEDGER}")) and (found := condition())):
            assert runner.poll() is None and time.monotonic() < deadline, "it ended, or took too long"
            time.sleep(0.05)
        return found


def left_by(root: Path) -> dict[str, dict[str, str]]:
    """The files of every stage; all of them have finished."""
    found = {}
    for name, stage in graph_of(config_of(root)).items():
        manifest = states.manifest_of(root / stage.folder)
        assert manifest is not None and not states.damage(root / stage.folder, manifest), name
        found[name] = manifest.files
    return found


def finished_part(root: Path, copy: Path) -> Path:
    """A copy of an experiment with what has finished, and nothing of what had begun."""
    copy.mkdir()
    shutil.copyfile(root / "config.yaml", copy / "config.yaml")
    for manifest in root.glob(f"jobs/*/*/{states.MANIFEST}"):
        shutil.copytree(manifest.parent, copy / manifest.parent.relative_to(root))
    return copy


def test_a_kill_of_the_runner_in_the_second_round_changes_nothing(tmp_path: Path) -> None:
    tokenizer = words_tokenizer(LETTERS)
    experiment = RealExperiment(
        tmp_path,
        save(tmp_path / "reference", endless_transformer(tokenizer), tokenizer),
        datasets={"ascents": {}},
        training={"datasets": ["ascents"], "micro_batch_size": 16, "gradient_checkpointing": False},
        generation={"max_new_tokens": 5},
        algos={"QSharp": {**SMALL, "loss_type": "bce", "guidance": {"mode": "bernoulli"}}},
    )
    second = "jobs/QSharp_tiny_ascents_r2"
    runner = experiment.start()
    groups = f"{second}/generating/done/**/*"
    experiment.until(runner, lambda: [one for one in experiment.root.glob(groups) if one.is_file()])
    runner.kill()
    runner.wait()
    unkilled = finished_part(experiment.root, tmp_path / "outputs" / "x" / "unkilled")
    assert not list(unkilled.glob(f"{second}/*"))
    root = experiment.root
    assert experiment.run(f"resume_from={root}") == 0
    assert experiment.run(f"resume_from={unkilled}") == 0
    assert left_by(root) == left_by(unkilled)
    starts = [line.split()[2] for line in (root / "run.log").read_text().splitlines() if " starts on " in line]
    again = {name for name in starts if starts.count(name) > 1}
    evaluations = {"QSharp_tiny_ascents_r1.evaluate", "reference_tiny_ascents.evaluate"}  # one may run beside it
    assert {"QSharp_tiny_ascents_r2.generate"} <= again <= {"QSharp_tiny_ascents_r2.generate", *evaluations}


def test_a_killed_stage_of_the_second_round_is_run_again_alone(tmp_path: Path) -> None:
    tokenizer = star_tokenizer()
    model = small_transformer(tokenizer)
    train_reference(model, tokenizer, 2, 2, steps=200, batch=32)
    experiment = RealExperiment(
        tmp_path,
        save(tmp_path / "reference", model, tokenizer),
        datasets={"star": {"made": {"branches": 2, "length": 2}}},
        training={"datasets": ["star"], "micro_batch_size": 16, "gradient_checkpointing": False},
        generation={"max_new_tokens": 3},
        data_collection={"max_examples": 24},
        algos={"DPO": {**SMALL, "lr": 1e-4}, "QSharp": {**SMALL}},
    )
    stage = "DPO_tiny_star_r2.train"

    def pid() -> int | None:
        record = read(experiment.root / LEDGER).get(stage)
        return record.pid if record is not None and record.state == RUNNING else None

    runner = experiment.start()
    os.kill(experiment.until(runner, pid), signal.SIGKILL)
    assert runner.wait(DEADLINE_S) == 1
    states_ = json.loads((experiment.root / "job_states.json").read_text())
    assert states_.pop("DPO_tiny_star_r2")["state"] == "FAILED"
    assert {one["state"] for one in states_.values()} == {"EVAL_COMPLETED"}
    assert experiment.run(f"resume_from={experiment.root}") == 0
    left_by(experiment.root)
    log = (experiment.root / "run.log").read_text()
    assert log.count(" starts on ") == len(graph_of(config_of(experiment.root))) + 1
    found = results(experiment.root)
    assert {*found["algo"]} == {"", "DPO", "QSharp"} and found["reward_mean"].notna().all()


def test_a_reward_model_scores_a_dataset_of_files(tmp_path: Path) -> None:
    tokenizer = words_tokenizer(LETTERS)
    posts = [json.dumps({"prompt": " ".join(LETTERS[place % 8] for place in range(n % 5 + 1))}) for n in range(24)]
    (tmp_path / "posts.jsonl").write_text("\n".join(posts) + "\n")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    judge = Qwen3ForSequenceClassification(
        Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, num_labels=1, **shape)
    )
    scored = {"path": str(tmp_path / "posts.jsonl"), "reward_model": save(tmp_path / "judge", judge, tokenizer)}
    experiment = RealExperiment(
        tmp_path,
        save(tmp_path / "reference", endless_transformer(tokenizer), tokenizer),
        datasets={"TLDR": scored},
        training={"datasets": ["TLDR"], "micro_batch_size": 16, "gradient_checkpointing": False},
        generation={"max_new_tokens": 4},
        rounds_of_training=1,
        algos={"QSharp": {**SMALL, "V_min": -2, "V_max": 2}},
    )
    assert experiment.run() == 0
    found = results(experiment.root)
    assert len({*found["reward_mean"]}) == 2 and found["reward_mean"].between(-2, 2).all()
