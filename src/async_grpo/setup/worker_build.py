"""Build a trainer whose file was written for another process: without what only the parameter server needs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from async_grpo.setup.trl_compat import is_adapter

_OFF_THE_HUB: dict[str, Any] = {"push_to_hub": False, "log_completions_hub_repo": None}
_NO_REFERENCE: dict[str, Any] = {"beta": 0.0, "sync_ref_model": False}
_REPORTS_NOTHING: dict[str, Any] = {"report_to": []}
KEPT = {"report_to"}  # TRL also asks while it scores; the run of a tracker is begun and logged to by the server alone
_COPIED = {"beta"}  # what the trainer has as its own, too: the user's code may read it there


@contextmanager
def nothing_on_the_hub() -> Iterator[None]:
    """Inside this block, a `GRPOTrainer` makes no repository on the Hub and uploads nothing."""
    with _built_with(lambda model: _OFF_THE_HUB):
        yield


@contextmanager
def built_for_a_worker(ranks: int) -> Iterator[None]:
    """Inside this block, a `GRPOTrainer` is built to sample and to score.

    It does nothing on the Hub, which is the server's to do once, reports to no tracker, and loads no reference model,
    whose log-probabilities are the training side's. An adapter's own reference stays: it is part of the model whose
    weights are shared.

    Args:
        ranks: processes of the trainer. A worker is one process, so TRL's arithmetic of batches, and its refusals,
            would be of another batch than the run's.
    """
    from transformers import TrainingArguments

    world_size = vars(TrainingArguments)["world_size"]
    TrainingArguments.world_size = property(lambda self: ranks)
    try:
        everyone = {**_OFF_THE_HUB, **_REPORTS_NOTHING}
        with _built_with(lambda model: everyone if is_adapter(model) else {**everyone, **_NO_REFERENCE}):
            yield
    finally:
        TrainingArguments.world_size = world_size


@contextmanager
def _built_with(changes_for: Any) -> Iterator[None]:
    """While a `GRPOTrainer` is built, its configuration has these values; afterwards the user's, but for `KEPT`."""
    from trl import GRPOTrainer

    build = GRPOTrainer.__init__
    signature = inspect.signature(build)

    @wraps(build)
    def build_changed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        config: Any = given.get("args")
        changes = changes_for(given.get("model")) if config is not None else {}
        kept = {name: getattr(config, name) for name in changes}
        vars(config or self).update(changes)
        try:
            build(self, *args, **kwargs)
        finally:
            vars(config or self).update({name: value for name, value in kept.items() if name not in KEPT})
        vars(self).update({name: kept[name] for name in _COPIED & kept.keys()})

    GRPOTrainer.__init__ = build_changed
    try:
        yield
    finally:
        GRPOTrainer.__init__ = build
