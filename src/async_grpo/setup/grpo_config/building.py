"""While a trainer is built: gives its `GRPOConfig` the values of `--set`, and refuses a batch that does not divide.

In a process on the CPU it also says `use_cpu=True`, without which transformers refuses bf16, the default of TRL.

`GRPOConfig` is changed when the setup file, or what it imports, has imported TRL, not before: the file may set
variables of the environment first, or import Unsloth, which wants to come before TRL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from async_grpo.errors import UsageError
from async_grpo.setup.grpo_config.batch import Batch, BatchError, misfit
from async_grpo.setup.grpo_config.values import parsed
from async_grpo.setup.imports import when_imported

if TYPE_CHECKING:
    from trl import GRPOTrainer

_MODULE = "trl.trainer.grpo_config"
_CHANGED_BY_TRL = ("use_vllm", "gradient_checkpointing_kwargs", "dataloader_num_workers", "liger_kernel_config")
"""Fields that a trainer may change itself while it is built; `use_vllm` is changed by `engines_left_to_workers`."""


@contextmanager
def configurations_with(texts: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Inside this block, each `GRPOConfig` has these values, whatever it is given.

    They are in place before the configuration checks itself, so what is derived from them is right. Yields what
    became of them in each configuration that is made.
    """
    values = parsed(texts)
    made: list[dict[str, Any]] = []
    restored: list[Callable[[], None]] = []

    def change(module: ModuleType) -> None:
        config_class: Any = vars(module)["GRPOConfig"]
        check = config_class.__post_init__

        def set_and_check(self: Any) -> None:
            if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # `hold_to_device`: this process computes on the CPU
                self.use_cpu = True
            own = {name: value for name, value in values.items() if hasattr(self, name)}
            vars(self).update(own)
            _check_itself(self, check)
            made.append({name: getattr(self, name) for name in own})

        config_class.__post_init__ = set_and_check
        restored.append(lambda: setattr(config_class, "__post_init__", check))

    finder = when_imported(_MODULE, change)
    try:
        yield made
    finally:
        if finder is not None and finder in sys.meta_path:
            sys.meta_path.remove(finder)
        for restore in restored:
            restore()


def _check_itself(config: Any, check: Callable[[Any], None]) -> None:
    try:
        check(config)
    except ValueError as error:
        batch = Batch.of(config)
        if batch is not None and misfit(batch):
            raise BatchError(batch) from error
        raise


def check_set(trainer: GRPOTrainer, texts: Mapping[str, str], made: list[dict[str, Any]]) -> None:
    """Raise `UsageError` where the trainer does not train with these values."""
    if not texts:
        return
    if not made:
        raise UsageError(
            f"--set {next(iter(texts))} has no effect: the setup file makes no GRPOConfig, neither when it is loaded "
            "nor in get_trainer(). Give the trainer args=GRPOConfig(...), or leave --set out."
        )
    for name in texts:
        values = [config[name] for config in made if name in config]
        if not values:
            raise UsageError(
                f"--set {name}={texts[name]} has no effect: it is a field of PPOConfig, and the setup file makes a "
                f"{type(trainer.args).__name__}. Train with PPOTrainer(args=PPOConfig(...)), or leave --set out."
            )
        if name not in _CHANGED_BY_TRL and getattr(trainer.args, name) not in values:
            raise UsageError(
                f"--set {name}={texts[name]} has no effect: the trainer has {getattr(trainer.args, name)!r}. The setup "
                "file changes this field after the GRPOConfig is made: give it to the GRPOConfig, or leave --set out."
            )
