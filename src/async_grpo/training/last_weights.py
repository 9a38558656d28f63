"""The weights that a run from Python ends with: kept in the run directory where no checkpoint has them.

In plain TRL they are in `trainer.model` when `train()` returns. A run's trainer is gone by then, so `Result.model()`
would have nothing to load where `save_strategy` saves no checkpoint of the last step.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from async_grpo.archive.disk_space import said_if_full, wait_for_space
from async_grpo.rundir.paths import KEEP_LAST_WEIGHTS, RunDir
from async_grpo.setup.fingerprints import count
from async_grpo.setup.trl_compat import is_adapter
from async_grpo.telemetry.activity import SAVING, activity

if TYPE_CHECKING:
    from trl import GRPOTrainer


def keep_last_weights(trainer: GRPOTrainer, run: RunDir, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Where the run was started from Python, have its last weights kept. Every rank of the trainer calls this."""
    if KEEP_LAST_WEIGHTS in os.environ:
        trainer.add_callback(_KeepsLastWeights(trainer, run, should_stop))


class _KeepsLastWeights(TrainerCallback):
    """Called after the callbacks of the setup file, which may still change the model."""

    def __init__(self, trainer: GRPOTrainer, run: RunDir, should_stop: Callable[[], bool]) -> None:
        self._trainer, self._should_stop = trainer, should_stop
        self._path = run.last_weights
        self._written = run.last_weights.with_name("last_weights.part")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:  # a resumed run trains on: they are no longer the last
            shutil.rmtree(self._path, ignore_errors=True)
            shutil.rmtree(self._written, ignore_errors=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._trainer.saved_at and not self._in_pieces():
            return
        activity.doing(SAVING)
        folder, needed = self._path.parent, self._bytes()
        if state.is_world_process_zero:
            wait_for_space(folder, needed, make_space=lambda: None, should_stop=self._should_stop)
        with said_if_full(folder, needed, self._path.name):
            self._save()
        if state.is_world_process_zero:
            self._written.rename(self._path)

    def _in_pieces(self) -> bool:
        """Whether checkpoints have a file of each rank (FSDP's SHARDED_STATE_DICT), which transformers cannot load."""
        plugin = getattr(self._trainer.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)

    def _save(self) -> None:
        if self._in_pieces():
            self._trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self._trainer.save_model(str(self._written))

    def _bytes(self) -> int:
        parameters = self._trainer.model.parameters()
        saved = [p for p in parameters if p.requires_grad or not is_adapter(self._trainer.model)]
        return sum(count(p) * p.element_size() for p in saved)
