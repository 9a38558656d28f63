"""What the files of the contract with TRL share: who must follow when a hook moves, and a scripted batch."""

from __future__ import annotations

import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transformers
import trl

TRAINING = "async_grpo.training.trl_trainer"
SHARDING = "async_grpo.training.sharding"
LOSS = "async_grpo.training.corrections.trl_loss"
ROLLOUT = "async_grpo.rollout.trl_trainer"
PROMPTS = "async_grpo.training.prompts"
ON_CPU = "async_grpo.setup.trl_compat"
THREADS = "async_grpo.rollout.threads"
INSTALLED = f"trl {trl.__version__}, transformers {transformers.__version__}"


def moved(hook: str, change: str, *modules: str) -> str:
    return f"{INSTALLED}: {hook} {change}. {' and '.join(modules)} must follow."


def page_is_as_made_by(script: Path) -> bool:
    """Whether the page of a script that makes one holds what the script makes now."""
    made = runpy.run_path(str(script))
    return bool(made["PAGE"].read_text() == made["page"]())


def twice(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each row once for each of its two completions."""
    return [dict(row) for row in rows for _ in range(2)]


def scripted_rollout(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """Three tokens, of which the second is not the model's, for every prompt but the first: that has two."""
    ids = [[1, 2, 3] for _ in prompts]
    ids[0] = [4, trainer.eos_token_ids[0]]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-0.5 - index for index in range(len(row))] for row in ids],
        "env_mask": [[1, 0, 1][: len(row)] for row in ids],
        "score": [float(index) for index in range(len(prompts))],
    }
