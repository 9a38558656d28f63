"""Build a trainer whose file was written for another process: without what only the parameter server needs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from async_grpo.setup.replaced import instead, naming_arguments
from async_grpo.setup.trl_compat import is_adapter

_OFF_THE_HUB: dict[str, Any] = {"push_to_hub": False, "log_completions_hub_repo": None}
_NO_REFERENCE: dict[str, Any] = {"beta": 0.0, "sync_ref_model": False}
_REPORTS_NOTHING: dict[str, Any] = {"report_to": []}
KEPT = {"report_to"}  # TRL also asks while it scores; the run of a tracker is begun and logged to by the server alone
_COPIED = {"beta"}  # what the trainer has as its own, too: the user's code may read it there


@contextmanager
def built_to_describe() -> Iterator[None]:
    """Inside this block, a `GRPOTrainer` makes no repository on the Hub and no folder in its `output_dir`."""
    with _built_with(lambda given: {**_OFF_THE_HUB, "log_completions": False}):
        yield


@contextmanager
def built_for_a_worker(ranks: int, *, policy_on_cpu: bool = False) -> Iterator[None]:
    """Inside this block, a `GRPOTrainer` is built to sample and to score.

    It does nothing on the Hub, which is the server's to do once, reports to no tracker, and loads no reference model,
    whose log-probabilities are the training side's. An adapter's own reference stays: it is part of the model whose
    weights are shared.

    Args:
        ranks: processes of the trainer. A worker is one process, so TRL's arithmetic of batches, and its refusals,
            would be of another batch than the run's.
        policy_on_cpu: its weights will be read in place on the GPU, which has no memory to spare for them until then. A
            reward model goes to the GPU as ever, and so does a model that has to be there (`stays_as_loaded`).
    """
    from transformers import TrainingArguments

    built = _built_with(partial(_for_a_worker, policy_on_cpu=policy_on_cpu), policy_on_cpu=policy_on_cpu)
    with instead(TrainingArguments, world_size=property(lambda self: ranks)), built:
        yield


def stays_as_loaded(model: Any) -> bool:
    """Whether nobody may move this model: its weights are quantised for the device, or Unsloth has made it."""
    quantised = getattr(model, "hf_quantizer", None) or getattr(model, "quantization_method", None)
    return quantised is not None or "unsloth" in sys.modules


def _for_a_worker(given: Mapping[str, Any], *, policy_on_cpu: bool) -> dict[str, Any]:
    """What the configuration says in a worker, by the arguments of the `GRPOTrainer`."""
    changes = {**_OFF_THE_HUB, **_REPORTS_NOTHING}
    if not is_adapter(given.get("model")):
        changes |= _NO_REFERENCE
    if policy_on_cpu and isinstance(given.get("model"), str) and not stays_as_loaded(None):
        loading = dict(given["args"].model_init_kwargs or {})
        if given.get("quantization_config", loading.get("quantization_config")) is None:
            changes["model_init_kwargs"] = {**loading, "device_map": None}  # else TRL has it loaded onto the GPU
    return changes


@contextmanager
def _built_with(
    changes_for: Callable[[Mapping[str, Any]], Mapping[str, Any]], *, policy_on_cpu: bool = False
) -> Iterator[None]:
    """While a `GRPOTrainer` is built, its configuration has these values; afterwards the user's, but for `KEPT`."""
    from transformers import TrainingArguments
    from trl import GRPOTrainer

    build = GRPOTrainer.__init__
    named = naming_arguments(GRPOTrainer)

    @wraps(build)
    def build_changed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = named(self, *args, **kwargs)
        config: Any = given.get("args")
        changes = changes_for(given) if config is not None else {}
        stays = policy_on_cpu and not stays_as_loaded(given.get("model"))
        kept = {name: getattr(config, name) for name in changes}
        vars(config or self).update(changes)
        try:
            left = {"place_model_on_device": property(lambda self: False)} if stays else {}
            with instead(TrainingArguments, **left):
                build(self, *args, **kwargs)
        finally:
            vars(config or self).update({name: value for name, value in kept.items() if name not in KEPT})
        vars(self).update({name: kept[name] for name in _COPIED & kept.keys()})

    with instead(GRPOTrainer, __init__=build_changed):
        yield
