"""The setup file of the job: questions that are answered by searching. `train.py` sets what it reads (JOB_…)."""

import os
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from loguru import logger
from transformers import TrainerCallback
from trl import GRPOConfig

from async_grpo.credit import TurnGRPOTrainer
from async_grpo.envs import Fact, SearchEnv, generated_facts
from async_grpo.rewards.questions import OUTCOME_REWARDS, TURN_REWARDS

TASK = (
    "Answer the question. In each message, think first: <reasoning>…</reasoning>. Then either call the tool search, or "
    "answer with nothing but the answer: <answer>…</answer>.\n\n"
)
HELD_OUT = 40  # generated facts that are not trained on
on_cpu = os.environ["JOB_NUM_GPUS"] == "0"


class LossInLog(TrainerCallback):
    """Writes the loss where the service looks for its metrics: the output of the job."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs and "loss" in logs:
            logger.info("loss of step {}: {:.6f}", state.global_step, logs["loss"])


class Search(SearchEnv):
    index = os.environ.get("JOB_INDEX")  # None: generated facts


def of_channel(folder: str) -> Dataset:
    """JSON Lines files with `question` and `aliases`."""
    files = sorted(str(path) for path in Path(folder).rglob("*.jsonl"))
    return asked(load_dataset("json", data_files=files, split="train"))


def of_facts(facts: list[Fact]) -> Dataset:
    return asked(Dataset.from_list([{"question": fact.question, "aliases": [fact.answer]} for fact in facts]))


def asked(dataset: Dataset) -> Dataset:
    prompts = dataset.map(lambda row: {"prompt": [{"role": "user", "content": TASK + row["question"]}]})
    return prompts.select_columns(["prompt", "aliases"])


def rows() -> tuple[Dataset, Dataset | None]:
    """To train and to evaluate on: of the channels `training` and `evaluation`, or generated facts."""
    if folder := os.environ.get("JOB_DATA"):
        held_out = os.environ.get("JOB_EVALUATION")
        return of_channel(folder), of_channel(held_out) if held_out else None
    facts = generated_facts()
    return of_facts(facts[:-HELD_OUT]), of_facts(facts[-HELD_OUT:])


def get_trainer() -> TurnGRPOTrainer:
    job = os.environ
    train, held_out = rows()
    return TurnGRPOTrainer(
        model=job["JOB_MODEL_NAME"],
        reward_funcs=list(OUTCOME_REWARDS),
        turn_reward_funcs=list(TURN_REWARDS),
        credit=job["JOB_CREDIT"],
        turn_advantage_coef=float(job["JOB_TURN_ADVANTAGE_COEF"]),
        callbacks=[LossInLog()],
        environment_factory=Search,
        train_dataset=train,
        eval_dataset=held_out,
        args=GRPOConfig(
            output_dir=job["JOB_CHECKPOINTS"],
            max_steps=int(job["JOB_MAX_STEPS"]),
            learning_rate=float(job["JOB_LEARNING_RATE"]),
            per_device_train_batch_size=int(job["JOB_PER_DEVICE_TRAIN_BATCH_SIZE"]),
            gradient_accumulation_steps=int(job["JOB_GRAD_ACCUM_STEPS"]),
            num_generations=int(job["JOB_NUM_GENERATIONS"]),
            num_iterations=int(job["JOB_NUM_ITERATIONS"]),
            max_completion_length=int(job["JOB_MAX_COMPLETION_LENGTH"]),
            beta=float(job["JOB_BETA"]),
            seed=int(job["JOB_SEED"]),
            save_steps=int(job["JOB_SAVE_STEPS"]),
            save_total_limit=int(job["JOB_CHECKPOINTS_KEPT"]),
            max_tool_calling_iterations=2,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            max_grad_norm=0.1,
            adam_beta2=0.99,
            use_vllm=not on_cpu,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=float(job["JOB_VLLM_GPU_MEMORY_UTILIZATION"]),
            vllm_max_model_length=int(job["JOB_MAX_MODEL_LEN"]) or None,
            bf16=not on_cpu,
            use_cpu=on_cpu,
            logging_steps=1,
            report_to=job["JOB_REPORT_TO"],
        ),
    )
