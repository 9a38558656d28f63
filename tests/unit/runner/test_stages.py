"""What real stages make of the configuration, and of what was sampled."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from experiment_yard import tree
from transformers import Qwen3Config, Qwen3ForSequenceClassification

from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo_experiments import loop_progress
from async_grpo_experiments.algorithms.protocols import Cut, PreferenceSettings
from async_grpo_experiments.algorithms.rows import NO_ROWS, LabelledRow, Rows, preferable
from async_grpo_experiments.guidance.head import ValueHead
from async_grpo_experiments.problems.table import load
from async_grpo_experiments.reward_models import load_reward_model
from async_grpo_experiments.runner import stages, states
from async_grpo_experiments.runner.config import ExperimentConfig, checked
from async_grpo_experiments.runner.config_files import write_config
from async_grpo_experiments.runner.experiment import ranks_command, stage_command
from async_grpo_experiments.runner.graph import graph_of, jobs_of
from async_grpo_experiments.runner.stage_settings import check, settings_of
from async_grpo_experiments.runner.stages import SampledAnswers, StageOutOfMemory, Work
from async_grpo_experiments.worlds.sentiment import sentiment_tokenizer
from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer


def test_an_algorithm_gets_its_own_keys_over_the_shared_ones() -> None:
    config = checked(
        tree(
            algos={"QSharp": {"lr": 1e-3, "enabled": True}, "PITA": {"guidance": {"eta": 0.5}}},
            models={"tiny": {"ref": "reference", "value": "small"}},
            data_collection={"samples_per_example": 7, "bradley_terry_beta": 2.0},
            generation={"temperature": 0.9},
        )
    )
    qsharp, pita = (settings_of(config, algo, "tiny", 5) for algo in ("QSharp", "PITA"))
    assert (qsharp.lr, qsharp.samples_per_example, qsharp.temperature, qsharp.seed) == (1e-3, 7, 0.9, 5)
    assert (pita.value, pita.bradley_terry_beta, pita.guidance.strength) == ("small", 2.0, 0.5)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"algos": {"PITA": {"batchsize": 3}}}, "the nearest is 'batch_size'"),
        ({"algos": {"QSharp": {"loss_type": "bradley_terry"}}}, "take PITA"),
        ({"datasets": {"sums": {"source": "TLDR"}}}, r"set datasets\.sums\.reward_model=FOLDER"),
        ({"datasets": {"sums": {"reward_model": "x"}}}, r"right or wrong, .* score TLDR and sentiment"),
        ({"datasets": {"sums": {"source": "sum"}}}, "sum is not the name of a set"),
        (
            {
                "algos": {"QSharp": {"loss_type": "bce", "guidance": {"mode": "bernoulli"}}},
                "datasets": {"sums": {"source": "ascents", "made": {"graded": True}}},
            },
            "those of sums are graded: set algos.QSharp.loss_type=mle",
        ),
    ],
)
def test_what_an_algorithm_or_a_dataset_does_not_know_is_refused(keys: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(checked(tree(**keys)))


def test_a_dataset_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"question": [], "answer": []}).to_parquet(str(path))
    with pytest.raises(UsageError, match="has no rows that can be read"):
        check(checked(tree(datasets={"sums": {"source": "GSM8K", "path": str(path)}})))


def test_cuts_are_answered_by_their_wave_and_request() -> None:
    rows: list[dict[str, Any]] = [
        {"problem": 1, "wave": wave, "request": request, "prompt_ids": [9], "completion_ids": ids, "reward": reward}
        for wave, request, ids, reward in [(0, 0, [1, 2], 0.0), (1, 0, [1, 3], 1.0), (1, 1, [1, 2, 4], 0.5)]
    ]
    answers = SampledAnswers(rows, [row["reward"] for row in rows], verified=False)
    assert [one.completions for one in answers.answer([Cut(problem=0), Cut(problem=1)])] == [((1, 2),)]
    second = answers.answer([Cut(problem=1, prefix=(1,)), Cut(problem=1, prefix=(1, 2))])
    assert [(one.completions, one.rewards) for one in second] == [(((3,),), (1.0,)), (((4,),), (0.5,))]


@pytest.mark.parametrize(("dataset", "preferred"), [("sums", (0.0, 5.0)), ("sentiment", (0.0, 1.0))])
def test_what_is_right_has_its_bonus_where_a_dataset_is_verified(dataset: str, preferred: tuple[float, ...]) -> None:
    row = {"problem": 0, "wave": 0, "request": 0, "prompt_ids": [9], "completion_ids": [1]}
    answers = SampledAnswers([row, row], [0.0, 1.0], verified=load(dataset, max_examples=1).verified)
    (found,) = answers.answer([Cut(problem=0, count=2)])
    assert preferable(found, PreferenceSettings(reference="any")) == preferred


def reward_model(folder: Path, tokenizer: Any) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"initializer_range": 0.3}
    config = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, num_labels=1, **shape)
    return save(folder, Qwen3ForSequenceClassification(config), tokenizer)


def scored_by(tmp_path: Path, tokenizer: Any, batch: int = 32) -> ExperimentConfig:
    """An experiment on the start of reviews, whose rest a reward model of this tokenizer scores."""
    reference = save(tmp_path / "reference", small_transformer(sentiment_tokenizer()), sentiment_tokenizer())
    scored = {"source": "sentiment", "reward_model": reward_model(tmp_path / "judge", tokenizer)}
    keys = {"models": {"tiny": {"ref": reference}}, "data_collection": {"reward_batch_size": batch}}
    return checked(tree(datasets={"sums": scored}, **keys))


@pytest.mark.parametrize("batch", [2, 32])
def test_a_reward_model_scores_what_was_sampled(tmp_path: Path, batch: int) -> None:
    config = scored_by(tmp_path, sentiment_tokenizer(), batch)
    check(config)
    samples = [{"prompt_ids": [3], "completion_ids": [1] * (n + 1), "reward": 0.0} for n in range(8)]
    found = Work(config, jobs_of(config)[1])._rewards(samples)
    judge = load_reward_model(str(tmp_path / "judge"))
    texts = [torch.tensor([[3, *row["completion_ids"]]]) for row in samples]
    alone = [judge(text, use_cache=False).logits.item() for text in texts]
    assert found == pytest.approx(alone, abs=1e-5) and len({round(one, 4) for one in found}) == 8


def test_a_reward_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the same token to both"):
        check(scored_by(tmp_path, words_tokenizer("abcdefgh")))


@pytest.mark.parametrize(
    ("dataset", "reward"),
    [
        ({}, "async_grpo_experiments.problems.table:exactly"),
        ({"source": "sentiment", "reward_model": "judge"}, "judge"),
    ],
)
def test_grpo_is_rewarded_by_the_function_of_its_dataset_or_by_a_model(dataset: dict[str, str], reward: str) -> None:
    config = checked(tree(algos={"GRPO": {}}, datasets={"sums": dataset}))
    assert Work(config, jobs_of(config)[1]).algorithm._reward == reward


@pytest.mark.parametrize(("written", "is_memory"), [("OutOfMemoryError: 3 GB", True), ("ValueError: no", False)])
def test_a_run_of_grpo_that_was_out_of_memory_is_told_from_one_that_failed(
    tmp_path: Path, written: str, is_memory: bool
) -> None:
    """What an earlier attempt has written into the same log does not count."""
    config = checked(tree(algos={"GRPO": {}}))
    job = next(one for one in jobs_of(config) if one.algo == "GRPO")
    work, run = Work(config, job, tmp_path), tmp_path / "jobs" / job.id / "training" / "run"
    log, partial = run / "log_parameter_server.txt", tmp_path / "model.partial-x"
    (partial / "work").mkdir(parents=True)
    (partial / "work" / "training").touch()  # it continues
    data = tmp_path / "jobs" / job.id / "data"
    for folder in (run, data):
        folder.mkdir(parents=True)
    NO_ROWS.save(data / "rows.arrow")
    log.write_text("torch.OutOfMemoryError: of an earlier attempt\n")

    class Fails:
        def train(self, *_: Any, **__: Any) -> None:
            with log.open("a") as file:
                file.write(written)
            raise UsageError("the run has failed")

    work.algorithm = Fails()
    with pytest.raises(AsyncGRPOError, match="the run has failed") as failed:
        work.train(partial)
    assert isinstance(failed.value, StageOutOfMemory) is is_memory


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_command_of_a_stage_continues_what_a_killed_attempt_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    config, run = checked(tree()), tmp_path / "generating"
    if has_begun:
        run.mkdir()
    started = Mock(return_value=Mock(wait=lambda: 0))
    monkeypatch.setattr(stages.subprocess, "Popen", started)
    Work(config, jobs_of(config)[1], tmp_path)._child("generate", "model", tmp_path / "setup.py", run)
    assert ("--resume" in started.call_args.args[0]) is has_begun


def test_a_long_loop_says_how_far_it_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(loop_progress, "SAY_EVERY_S", -1.0)
    monkeypatch.setattr(loop_progress.logger, "info", said.append)
    assert [*loop_progress.told("abc", "letters are read")] == ["a", "b", "c"]
    assert said[-1] == "2 of 3 letters are read"


# --- A training stage in two processes, which accelerate starts, on the CPU with gloo: ---------------------------

NAME = "QSharp_tiny_sums_r1.train"


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


@pytest.mark.slow
@pytest.mark.integration
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
