"""Sweeps and experiments of real training: killed and resumed, with plain TRL, and with the rewards of a model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from async_grpo.roles.plain_trl import read_progress
from async_grpo.rundir.paths import RunDir
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.runner.results import results
from async_grpo_experiments.slots.ledger import LEDGER, RUNNING, read
from async_grpo_experiments.worlds.enumerable import LETTERS
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer
from kit.real_experiment import DEADLINE_S, SMALL, WITHOUT_CHECKPOINTING, RealExperiment, all_stages_have_finished
from kit.runs import SETUP, command, ran, steps_logged

ARGUMENTS = ("--seeds", "1,2", "--num-instances", "2", "--eval-every", "6", "--stagger", "0")


@pytest.mark.slow
def test_a_killed_sweep_leaves_no_process_and_is_resumed_from_checkpoints(tmp_path: Path) -> None:
    env = {"TEST_EVAL": "4", "TEST_STEPS": "18", "TEST_REWARD_S": "0.2"}
    runs = [tmp_path / "outputs" / f"trl_random_model_instance{index}_seed{index + 1}" / "run" for index in range(2)]

    def trained() -> bool:
        logs = [run / "metrics.jsonl" for run in runs]
        return all(log.exists() and '"loss"' in log.read_text() for log in logs)

    with command("sweep", str(SETUP), *ARGUMENTS, cwd=tmp_path, **env) as sweep:
        sweep.wait_until(trained, "steps")
        assert len(sweep.children()) >= 8  # of each run a launcher, a server and two workers
        sweep.kill()
    assert "n = 2 of 2 seeds (1, 2)." in ran("sweep", "--resume", cwd=tmp_path, **env)
    for run in runs:
        state = RunDir(run).read_state()
        assert state is not None and (state.state, state.step) == ("finished", 18)
        assert state.plan.training.seed == int(run.parent.name[-1])
    report = json.loads((tmp_path / "outputs" / "sweep_random_model" / "report.json").read_text())
    n = {row["step"]: row["n"] for row in report["evaluations"]["reward_mean"]}
    assert (n[18], min(n[6], n[12])) in ((2, 1), (2, 2))  # the run that was ahead may have had one open at the kill


@pytest.mark.slow
def test_plain_trl_runs_in_a_sweep_stops_with_a_checkpoint_and_continues(tmp_path: Path) -> None:
    env = {"TEST_EVAL": "4", "TEST_STEPS": "12", "TEST_REWARD_S": "1"}  # one run may load long after the other
    arguments = ("sweep", str(SETUP), "--mode", "trl", *ARGUMENTS)
    runs = [tmp_path / "outputs" / f"trl_random_model_instance{index}_seed{index + 1}" / "run" for index in range(2)]

    def step(run: Path) -> int:
        found = read_progress(run)
        return found.step if found is not None else 0

    with command(*arguments, cwd=tmp_path, **env) as sweep:
        sweep.wait_until(lambda: all(step(run) >= 2 for run in runs), "steps")
        sweep.process.terminate()
        assert sweep.wait() == 130, sweep.output
    stopped = [step(run) for run in runs]
    assert all(2 <= found <= 12 for found in stopped) and min(stopped) < 12, stopped
    assert all((run.parent / f"checkpoint-{found}").is_dir() for run, found in zip(runs, stopped, strict=True))
    shown = ran("sweep", "--resume", cwd=tmp_path, **env)
    records = read(tmp_path / "outputs" / "sweep_random_model" / "slots.jsonl")
    assert {record.state for record in records.values()} == {"finished"}
    assert "| 12 | 2 |" in shown
    assert sorted({*steps_logged(runs[0])}) == list(range(1, 13))  # none was skipped


@pytest.mark.timeout(3600)
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
