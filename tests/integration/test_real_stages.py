"""An experiment of real stages, composed by Hydra, with rewards of a model: one of them is killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.runner.results import results
from async_grpo_experiments.slots.ledger import LEDGER, RUNNING, read
from async_grpo_experiments.worlds.enumerable import LETTERS
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer
from kit.real_experiment import DEADLINE_S, SMALL, WITHOUT_CHECKPOINTING, RealExperiment, all_stages_have_finished

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("algorithms", [["QSharp"], pytest.param(["DPO", "QSharp"], marks=pytest.mark.slow)], ids=str)
def test_a_killed_stage_of_the_second_round_is_run_again_alone(algorithms: list[str], tmp_path: Path) -> None:
    """The prompts are of a file, and a reward model scores what is sampled."""
    tokenizer = words_tokenizer(LETTERS)
    posts = [json.dumps({"prompt": " ".join(LETTERS[index % 8] for index in range(n % 5 + 1))}) for n in range(24)]
    (tmp_path / "posts.jsonl").write_text("\n".join(posts) + "\n")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    judge = Qwen3ForSequenceClassification(
        Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, num_labels=1, **shape)
    )
    scored = {"path": str(tmp_path / "posts.jsonl"), "reward_model": save(tmp_path / "judge", judge, tokenizer)}
    settings = {"DPO": {**SMALL, "lr": 1e-4}, "QSharp": {**SMALL, "V_min": -2, "V_max": 2}}
    experiment = RealExperiment(
        tmp_path,
        save(tmp_path / "reference", endless_transformer(tokenizer), tokenizer),
        datasets={"TLDR": scored},
        training={"datasets": ["TLDR"], **WITHOUT_CHECKPOINTING},
        generation={"max_new_tokens": 4},
        algos={name: settings[name] for name in algorithms},
    )
    killed = f"{algorithms[0]}_tiny_TLDR_r2"

    def pid() -> int | None:
        record = read(experiment.root / LEDGER).get(f"{killed}.train")
        return record.pid if record is not None and record.state == RUNNING else None

    runner = experiment.write_conf().start()
    os.kill(experiment.until(runner, pid), signal.SIGKILL)
    assert runner.wait(DEADLINE_S) == 1
    states_ = json.loads((experiment.root / "job_states.json").read_text())
    assert states_.pop(killed)["state"] == "FAILED"
    assert {one["state"] for one in states_.values()} == {"EVAL_COMPLETED"}
    assert experiment.run(f"resume_from={experiment.root}") == 0
    all_stages_have_finished(experiment.root)
    log = (experiment.root / "run.log").read_text()
    assert log.count(" starts on ") == len(graph_of(config_of(experiment.root))) + 1
    found = results(experiment.root)
    assert {*found["algo"]} == {"", *algorithms}
    assert len({*found["reward_mean"]}) > 2 and found["reward_mean"].between(-2, 2).all()
