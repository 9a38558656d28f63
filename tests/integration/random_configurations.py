"""Random configurations of a trainer, each drawn from its seed, out of the fields whose effect is TRL's own."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig
from trl import GRPOTrainer

from kit.compared_with_trl import settings
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, length, letters

# Drawn independently of each other. TRL's own default comes first, and is drawn as often as all others together.
FIELDS: dict[str, Sequence[Any]] = {
    "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "epsilon": (0.2, 0.05, 0.4),
    "epsilon_high": (None, 0.28, 5.0),
    "delta": (None, 1.5),
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
    "mask_truncated_completions": (False, True),
    "top_entropy_quantile": (1.0, 0.5),
    "entropy_coef": (0.0, 0.01),
    "use_adaptive_entropy": (False, True),
    "entropy_coef_min": (0.0, 0.002),
    "entropy_coef_max": (1.0, 0.05),
    "entropy_coef_delta": (0.005, 0.02),
    "entropy_target": (0.2, 3.0),
    "use_bias_correction_kl": (True, False),
    "off_policy_mask_threshold": (None, 0.5),
    "sapo_temperature_neg": (1.05, 2.0),
    "sapo_temperature_pos": (1.0, 1.5),
    "vespo_k_pos": (2.0, 1.0),
    "vespo_lambda_pos": (3.0, 2.0),
    "vespo_k_neg": (3.0, 2.0),
    "vespo_lambda_neg": (2.0, 1.0),
    "temperature": (1.0, 0.7, 1.3),
    "top_p": (1.0, 0.8),
    "top_k": (0, 5),
    "min_p": (None, 0.05),
    "repetition_penalty": (1.0, 1.2),
    "generation_kwargs": (None, {"temperature": 0.5}, {"min_new_tokens": 3}, {"top_k": -1, "typical_p": 0.9}),
    "num_iterations": (1, 2),
    "shuffle_dataset": (True, False),
    "max_completion_length": (8, 5, 12),
    "pad_to_multiple_of": (None, 8),
    "cast_lm_head_to_fp32": (False, True),
    "disable_dropout": (False, True),
    "log_unique_prompts": (False, True),
    "seed": (3, 11, 42),
    "learning_rate": (1e-3, 1e-2),
    "lr_scheduler_type": ("linear", "constant", "cosine"),
    "warmup_steps": (0, 1),
    "weight_decay": (0.0, 0.1),
    "max_grad_norm": (1.0, 0.1),
    "optim": ("adamw_torch", "sgd"),
    "adam_beta1": (0.9, 0.5),
    "adam_beta2": (0.999, 0.9),
    "gradient_checkpointing": (False, True),
    "logging_steps": (1, 2),
    "use_cache": (False, True),
    "average_tokens_across_devices": (True, False),
    "max_steps": (2, 3),
}

TOGETHER = (
    *("num_generations", "per_device_train_batch_size", "steps_per_generation", "generation_batch_size"),
    *("gradient_accumulation_steps", "beta", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("reward_weights", "chat_template_kwargs"),
)
"""Fields that are drawn together, because TRL admits only some of their combinations."""

COVERING = (0, 5, 9, 23, 34, 38, 118, 125, 134, 153)
"""Seeds that draw each value at least once, together."""

ARGUMENTS = ("model", "reward_funcs", "args", "train_dataset", "processing_class", "peft_config")
"""The trainer's arguments that are drawn."""


def draw(seed: int, model_folder: str) -> dict[str, Any]:
    """The arguments of `build_trainer` that this seed draws."""
    chance = random.Random(seed)
    changes = {name: _one_of(chance, values) for name, values in FIELDS.items()}
    changes |= _batch(chance) | _reference(chance, model_folder)
    if chance.random() < 0.5:
        changes["reward_funcs"] = [letters, length]
        changes["reward_weights"] = chance.choice([None, [1.0, 0.25]])
    if chance.random() < 0.3:
        changes["chat_template"] = QWEN3_CHAT_TEMPLATE
        changes["chat_template_kwargs"] = chance.choice([None, {"enable_thinking": False}])
    if "peft_config" in changes:
        changes["cast_lm_head_to_fp32"] = False  # of a tied head in an adapter's model TRL itself cannot
    return changes


def trainer_of(seed: int, output_dir: Path, model_folder: str) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` of the configuration that this seed draws."""
    changes = draw(seed, model_folder)
    given = {"peft_config": changes.pop("peft_config")} if "peft_config" in changes else {}
    return settings(output_dir, given, **changes)


def padding_of(seed: int) -> str:
    """Whether padding is computed in the configuration of this seed.

    It is where a loss has a threshold among its tokens: rounding decides on which side of it the nearest one is.
    """
    drawn = random.Random(f"padding {seed}").choice(["none", "none", "trl"])
    return "trl" if draw(seed, "")["top_entropy_quantile"] < 1.0 else drawn


def _one_of(chance: random.Random, values: Sequence[Any]) -> Any:
    return values[0] if chance.random() < 0.5 else chance.choice(values[1:])


def _batch(chance: random.Random) -> dict[str, Any]:
    """One to four groups of two or four, in one to four micro-batches, of which an optimizer step takes some."""
    group_size, groups = chance.choice([2, 4]), chance.choice([1, 2, 4])
    micro = chance.choice([count for count in (1, 2, 4) if group_size * groups % count == 0])
    rows = group_size * groups // micro
    changes = {
        "num_generations": group_size,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": chance.choice([1, micro, 2]),
    }
    whole = chance.choice(["steps_per_generation", "generation_batch_size"])
    return {**changes, whole: micro if whole == "steps_per_generation" else rows * micro}


def _reference(chance: random.Random, model_folder: str) -> dict[str, Any]:
    kind = chance.choice(["none", "none", "model", "synchronised", "adapter"])
    if kind == "none":
        return {}
    if kind == "adapter":
        return {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "beta": chance.choice([0.0, 0.05])}
    synchronised = {"sync_ref_model": True, "ref_model_mixup_alpha": 0.5, "ref_model_sync_steps": 1}
    return {"model": model_folder, "beta": 0.05, **(synchronised if kind == "synchronised" else {})}
