"""A dataloader that the user's class makes is made once, as in TRL, though it is read twice.

The prompts of jobs are read ahead of the training loop, and the training loop counts its batches and epochs by it.
Each needs an iteration of its own: a sampler that shuffles draws its numbers from a generator that it keeps.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

from torch.utils.data import DataLoader

from async_grpo.setup.replaced import adapter

_SHARED = ("dataset", "collate_fn", "worker_init_fn", "gradient_state")  # attributes of a dataloader, not copied


@adapter
class OneDataLoader:
    """Put before the class of a trainer that makes its own training dataloader."""

    _for_prompts: Any = None

    def get_train_dataloader(self) -> Any:
        """For the training loop."""
        loader = super().get_train_dataloader()  # type: ignore[misc]
        self._for_prompts = _same_from_the_beginning(loader, self)
        return loader

    def take_loader_of_prompts(self) -> Any:
        """The same batches once more, from the first one on; a dataloader that cannot be copied is made again."""
        taken, self._for_prompts = self._for_prompts, None
        return super().get_train_dataloader() if taken is None else taken  # type: ignore[misc]


def _same_from_the_beginning(loader: Any, trainer: Any) -> Any:
    if not isinstance(loader, DataLoader):
        return None
    shared = [getattr(loader, name, None) for name in _SHARED]
    shared += [trainer, trainer.train_dataset, trainer.model, trainer.accelerator]
    try:
        return copy.deepcopy(loader, {id(one): one for one in shared if one is not None})
    except (TypeError, AttributeError, ValueError, RuntimeError, copy.Error, pickle.PicklingError):
        return None
