"""Recipe: GRPO on GSM8K, MATH or MBPP, with the rewards of `async_grpo.rewards`. Copy it, then change it.

    DATASET=math async-grpo train src/app/trainer_setup_dataset.py --distributed --eval-every 40

Environment:
    DATASET      gsm8k (default), math or mbpp
    DATA_PATH    a directory with train.jsonl and test.jsonl in the dataset's own columns; the hub's if not set
    MODEL_PATH   a directory or a hub name; Qwen/Qwen2.5-1.5B-Instruct if not set
    EVAL_ROWS    problems of an evaluation; 200 if not set

For MBPP the workers run programs that the model wrote, in a sandbox: set ASYNC_GRPO_RUN_MODEL_CODE=1 and read
SECURITY.md first.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from async_grpo.rewards import gsm8k, math, mbpp
from async_grpo.rewards.answers import SOLUTION_END, SOLUTION_START, WORK_END, WORK_START
from async_grpo.rewards.programs import check

DEFAULT_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
MAX_COMPLETION_TOKENS = 1024

INSTRUCTION = (
    f"Write down how you work it out between {WORK_START} and {WORK_END}, then give {{what}} "
    f"between {SOLUTION_START} and {SOLUTION_END}, and nothing after it."
)


# --- The datasets ---------------------------------------------------------------------------------


class DatasetTask(NamedTuple):
    """One dataset: where it is, what a row becomes, and what an answer is worth."""

    hub: tuple[str, str]  # repository and configuration
    splits: tuple[str, str]  # for training and for evaluation
    example: Callable[[dict[str, Any]], dict[str, Any] | None]  # None: the row cannot be used
    reward: Callable[..., list[float]]


def conversation(question: str, what: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION.format(what=what)}, {"role": "user", "content": question}]


def gsm8k_example(row: dict[str, Any]) -> dict[str, Any]:
    """A GSM8K answer is the work, then `####`, then the number."""
    prompt = conversation(row["question"], "the number and nothing else")
    return {"prompt": prompt, "answer": row["answer"].rpartition("####")[2].strip()}


def math_example(row: dict[str, Any]) -> dict[str, Any]:
    """The answer is in the solution's `\\boxed{}`; math-verify finds it."""
    return {"prompt": conversation(row["problem"], "the answer in LaTeX"), "answer": row["solution"]}


def mbpp_example(row: dict[str, Any]) -> dict[str, Any] | None:
    """Rows with a test of another form than `assert EXPRESSION == LITERAL` are left out: it could be cheated."""
    try:
        for test in row["test_list"]:
            check(test)
    except ValueError:
        return None
    question = f"{row.get('prompt') or row['text']}\n\nIt will be tested like this: {row['test_list'][0]}"
    return {"prompt": conversation(question, "the Python program"), "test_list": row["test_list"]}


TASKS = {
    "gsm8k": DatasetTask(("openai/gsm8k", "main"), ("train", "test"), gsm8k_example, gsm8k),
    "math": DatasetTask(("DigitalLearningGmbH/MATH-lighteval", "default"), ("train", "test"), math_example, math),
    "mbpp": DatasetTask(("google-research-datasets/mbpp", "sanitized"), ("train", "test"), mbpp_example, mbpp),
}


def chosen_task() -> tuple[str, DatasetTask]:
    name = os.environ.get("DATASET", "gsm8k")
    if name not in TASKS:
        raise ValueError(f"DATASET is {name!r}. Choose one of {', '.join(TASKS)}.")
    return name, TASKS[name]


def load(name: str, task: DatasetTask, split: str, at_most: int | None = None) -> Dataset:
    """Rows of `prompt`, of what the reward needs, and of `task`, the name of the dataset."""
    folder = os.environ.get("DATA_PATH")
    if folder:
        file = Path(folder) / f"{split}.jsonl"
        if not file.is_file():
            raise FileNotFoundError(
                f"There is no {file}. Set DATA_PATH to a directory with {split}.jsonl, or unset it."
            )
        rows = load_dataset("json", data_files=str(file), split="train")
    else:
        rows = load_dataset(*task.hub, split=split)
    examples = [example for row in rows if (example := task.example(row)) is not None]
    if not examples:
        raise ValueError(f"{folder or task.hub[0]} has no row of {name} that can be used.")
    print(f"{name}, {split}: {len(examples)} of {len(rows)} rows can be used", flush=True)
    return Dataset.from_list([{**example, "task": name} for example in examples[:at_most]])


# --- The trainer ----------------------------------------------------------------------------------


def get_trainer() -> GRPOTrainer:
    name, task = chosen_task()
    train_split, test_split = task.splits
    model = os.environ.get("MODEL_PATH") or DEFAULT_MODEL
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    tokenizer = AutoTokenizer.from_pretrained(model)
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16 if bf16 else torch.float32),
        processing_class=tokenizer,
        reward_funcs=[task.reward],
        train_dataset=load(name, task, train_split),
        eval_dataset=load(name, task, test_split, at_most=int(os.environ.get("EVAL_ROWS", "200"))),
        args=GRPOConfig(
            output_dir=f"outputs/{name}",
            max_steps=100,
            # 16 prompts a step, 32 completions of each; 8 completions at a time on the device.
            per_device_train_batch_size=8,
            gradient_accumulation_steps=64,
            num_generations=32,
            max_completion_length=MAX_COMPLETION_TOKENS,
            temperature=1.0,
            learning_rate=3e-6,
            lr_scheduler_type="constant",
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            beta=0.0,
            save_steps=50,
            logging_steps=1,
            report_to="none",
            bf16=bf16,
            use_cpu=not torch.cuda.is_available(),
        ),
    )
