"""What all trainings share: transformers' arguments, checkpoints, and what a row may be."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Trainer
from transformers.trainer_utils import get_last_checkpoint

from async_grpo.errors import UsageError
from async_grpo.setup.process import rank_of_launch
from async_grpo_experiments.algorithms.protocols import AlgorithmSettings, Trained
from async_grpo_experiments.algorithms.rows import Rows


def arguments(settings: AlgorithmSettings, out: Path, group: int = 1) -> dict[str, Any]:
    """Keywords of transformers' `TrainingArguments`, where an example is a group of this many rows."""
    if settings.micro_batch_size % group:
        raise UsageError(
            f"micro_batch_size {settings.micro_batch_size} must be a multiple of {group}, the rows of a group, which "
            f"are in one batch together: set micro_batch_size to {-(-settings.micro_batch_size // group) * group}."
        )
    on_gpu = torch.cuda.is_available()
    _, ranks = rank_of_launch(os.environ)
    return {
        "output_dir": str(out / "checkpoints"),
        "per_device_train_batch_size": settings.micro_batch_size // group,
        "gradient_accumulation_steps": settings.batch_size // (settings.micro_batch_size * ranks),
        "num_train_epochs": settings.epochs,
        "max_steps": settings.max_steps,
        "learning_rate": settings.lr,
        "weight_decay": settings.weight_decay,
        "max_grad_norm": settings.grad_clip,
        "gradient_checkpointing": False,
        "save_strategy": "steps" if settings.save_steps else "no",
        "save_steps": settings.save_steps or 500,
        "save_total_limit": 1,
        "torch_empty_cache_steps": settings.clear_cache_interval or None,
        "dataloader_num_workers": settings.num_workers,
        "seed": settings.seed,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "report_to": "none",
        "logging_steps": 10,
        "disable_tqdm": True,
    }


def fit(trainer: Trainer, folder: Path, save: Callable[[Path], None]) -> Trained:
    """Train, from the last checkpoint where one is, and save what was trained in `folder`."""
    if folder.exists():
        raise UsageError(f"{folder} holds what another training left: name another folder, or move it away.")
    checkpoints = Path(trainer.args.output_dir)
    last = get_last_checkpoint(str(checkpoints)) if checkpoints.is_dir() else None
    found = trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        save(folder)
    return Trained(
        steps=found.global_step, loss=found.training_loss, seconds=found.metrics["train_runtime"], folder=folder
    )


def check_lengths(rows: Rows, config: Any) -> None:
    """Refuse a row that the model has no positions for: nothing is truncated, and none is left out."""
    most = getattr(config, "max_position_embeddings", None)
    for index, row in enumerate(rows.items):
        if most is not None and len(row.tokens) > most:
            raise UsageError(
                f"row {index} (problem {row.problem}) has {len(row.tokens)} tokens, and the model has {most} "
                "positions: sample with a smaller max_new_tokens."
            )


def load_policy(name: str, settings: AlgorithmSettings) -> Any:
    """A causal language model in float32, as all trainings here load one."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, attn_implementation=settings.attn_impl)
