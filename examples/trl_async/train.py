"""TRL's asynchronous trainer, with two worker processes of this queue: no vLLM server, no NCCL, no GPU.

    python examples/trl_async/train.py

The task: write as many letters "a" as possible. A worker that is killed is started again, and its rollouts with it.
"""

import sys
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from async_grpo.trl_async import FileQueueRolloutWorker

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_model import build_model, build_tokenizer

MODEL = "tiny_model"  # a folder, which main() writes; or the name of a model, such as "Qwen/Qwen3-0.6B"
DATASET = Dataset.from_dict({"prompt": [f"{letter}?" for letter in "bcdefgh"]})


def share_of_a(completions: list[str], **kwargs) -> list[float]:
    return [text.count("a") / max(1, len(text)) for text in completions]


def get_trainer() -> GRPOTrainer:
    """What each worker loads: the model, and the rewards. It samples as the AsyncGRPOConfig says."""
    return GRPOTrainer(MODEL, share_of_a, GRPOConfig("worker_output"), DATASET)


def main() -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(MODEL)
    build_model(tokenizer).save_pretrained(MODEL)
    args = AsyncGRPOConfig(
        "trl_output",
        max_steps=20,
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=16,
        token_budget=0,  # a step has per_device_train_batch_size samples, whatever their lengths
        learning_rate=1e-3,
        report_to="none",
        bf16=False,
        use_cpu=not torch.cuda.is_available(),
    )
    rollouts = FileQueueRolloutWorker(get_trainer, args, DATASET, workers=2)
    trainer = AsyncGRPOTrainer(
        MODEL, args=args, train_dataset=DATASET, rollout_worker=rollouts, weight_transfer=rollouts.weights
    )
    trainer.train()


if __name__ == "__main__":
    main()
