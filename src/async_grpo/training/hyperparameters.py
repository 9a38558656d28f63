"""The contents of `hyperparameters.json`: what a run and its trainer are set to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from async_grpo.archive.advantages import CRITIC
from async_grpo.records import distinct
from async_grpo.redaction import MASK, Redactor, is_secret
from async_grpo.settings import TrainingSettings
from async_grpo.setup.algorithm import compares_groups
from async_grpo.setup.fingerprints import count

if TYPE_CHECKING:
    from trl import GRPOTrainer

_redact = Redactor()


def hyperparameters(trainer: GRPOTrainer, settings: TrainingSettings) -> dict[str, Any]:
    """The contents of `hyperparameters.json`: JSON values only, and no secrets."""
    model = trainer.model
    return {
        "model": _redact(str(getattr(model.config, "_name_or_path", "") or type(model).__name__)),
        "parameters": sum(count(p) for p in model.parameters()),
        "trainable_parameters": sum(count(p) for p in model.parameters() if p.requires_grad),
        "reward_functions": distinct(trainer.reward_func_names),
        "reward_weights": [float(f"{float(weight):.6g}") for weight in trainer.reward_weights],
        "scale_rewards": str(trainer.scale_rewards),
        "multi_objective_aggregation": str(trainer.multi_objective_aggregation),
        "num_generations": int(trainer.num_generations),
        **({} if compares_groups(trainer) else {"advantages": CRITIC}),
        "run": _plain({name: value for name, value in asdict(settings).items() if name != "keep_done"}),
        "trainer": configuration(trainer),
    }


def configuration(trainer: GRPOTrainer) -> dict[str, Any]:
    """The fields of the trainer's `GRPOConfig` that have a value."""
    return {name: _plain(value) for name, value in trainer.args.to_dict().items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): MASK if is_secret(str(name), it) else _plain(it) for name, it in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return _redact(str(value))
