"""What the trainer was set to, for people and for who reads the archive without TRL: `hyperparameters.json`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from async_grpo.redaction import MASK, names_a_secret
from async_grpo.settings import TrainingSettings

if TYPE_CHECKING:
    from trl import GRPOTrainer


def hyperparameters(trainer: GRPOTrainer, settings: TrainingSettings) -> dict[str, Any]:
    """JSON values only, and no secrets."""
    model = trainer.model
    return {
        "model": str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
        "parameters": sum(p.numel() for p in model.parameters()),
        "trainable_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "reward_functions": list(trainer.reward_func_names),
        "reward_weights": [float(f"{float(weight):.6g}") for weight in trainer.reward_weights],
        "scale_rewards": str(trainer.scale_rewards),
        "multi_objective_aggregation": str(trainer.multi_objective_aggregation),
        "num_generations": int(trainer.num_generations),
        "run": _plain({name: value for name, value in asdict(settings).items() if name != "keep_done"}),
        "trainer": _plain({name: value for name, value in trainer.args.to_dict().items() if value is not None}),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): MASK if _is_secret(str(name), it) else _plain(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)


def _is_secret(name: str, value: Any) -> bool:
    """Names decide; a number or a switch, as in `max_tokens`, is none."""
    harmless = value is None or isinstance(value, (bool, int, float)) or name.lower().endswith("tokens")
    return names_a_secret(name) and not harmless
