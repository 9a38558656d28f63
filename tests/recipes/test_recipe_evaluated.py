"""The GSM8K recipe with a tiny model and real problems, evaluated from the command line over two workers."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import Command, command
from tiny_gsm8k_model import REAL_GSM8K, make_tiny_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_grpo.archive.groups import FinishedGroups
from async_grpo.records import RolloutGroup

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[2] / "src" / "app" / "trainer_setup_dataset.py"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
PROBLEMS, TOKENS = 50, 1024  # the recipe's length
GREEDY = ("--eval-temperature", "0", "--eval-replicates", "1")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The recipe's environment: a model in `model`, the real data."""
    if not REAL_GSM8K.is_dir():
        pytest.skip(f"the real GSM8K is not in {REAL_GSM8K}")
    model = make_tiny_qwen3(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    return {"MODEL_PATH": str(model), "DATA_PATH": str(REAL_GSM8K), "EVAL_ROWS": str(PROBLEMS), "DATASET": "gsm8k"}


def kill_a_worker_that_answers(run: Command, folder: Path) -> None:
    """SIGKILL for worker 1, while it has jobs of the evaluation."""
    run.wait_until(lambda: [*folder.glob("queue/9*_processing_by_dev1.*")], "a job of the evaluation on worker 1")
    worker = run.worker(1)
    assert worker is not None
    worker.kill()


def greedy(model_folder: str, prompt: Any) -> list[int]:
    """What `model.generate` makes of one prompt, the end of text included."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_folder), AutoModelForCausalLM.from_pretrained(model_folder)
    inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def answers(folder: Path) -> list[RolloutGroup]:
    return sorted((found.group for found in FinishedGroups(folder).evaluated()), key=lambda group: group.job.seq)


def test_with_one_of_two_workers_killed_every_greedy_answer_is_that_of_generate(
    tmp_path: Path, env: dict[str, str]
) -> None:
    asked = ("evaluate", env["MODEL_PATH"], "--config", str(RECIPE), "-n", "2", *GREEDY, "--json", "figures.json")
    with command(*asked, cwd=tmp_path, **env) as run:
        kill_a_worker_that_answers(run, tmp_path / "evaluation")
        assert run.wait() == 0, run.output
    assert "worker 1 ended (killed by SIGKILL); starting it again" in run.output
    (result,) = json.loads((tmp_path / "figures.json").read_text())["models"].values()
    assert result["failed"] == {}
    assert result["figures"]["pass@1"]["problems"] == PROBLEMS
    groups = answers(tmp_path / "evaluation")
    assert len(groups) == PROBLEMS
    rows = [json.loads(line) for line in (REAL_GSM8K / "test.jsonl").read_text().splitlines()[:PROBLEMS]]
    assert [group.job.row["prompt"][-1]["content"] for group in groups] == [row["question"] for row in rows]
    assert [group.completion_ids.tolist() for group in groups] == [
        greedy(env["MODEL_PATH"], group.job.row["prompt"]) for group in groups
    ]


def test_training_by_the_recipe_evaluates_before_and_after_though_a_worker_is_killed(
    tmp_path: Path, env: dict[str, str]
) -> None:
    small = ("--set", "num_generations=2", "--set", "per_device_train_batch_size=4")
    small = (*small, "--set", "gradient_accumulation_steps=1", "--set", "max_completion_length=32")
    asked = ("train", str(RECIPE), "-n", "2", "--steps", "2", "--eval-every", "2", *small)
    with command(*asked, cwd=tmp_path, **env, OMP_NUM_THREADS="1") as run:
        kill_a_worker_that_answers(run, tmp_path / "worker")
        assert run.wait() == 0, run.output
    lines = (tmp_path / "worker" / "evaluations.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["step"] for one in found] == [0, 2]
    for one in found:
        assert one["failed"] == {} and one["figures"]["pass@5"]["problems"] == PROBLEMS
        assert set(one["tasks"]) == {"gsm8k"}
