"""Models that are trained once by supervised learning, before a benchmark trains them: kept in the user's cache."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from torch.nn.functional import cross_entropy


def load_warm_start(model: Any, name: str, train: Callable[[], None]) -> float:
    """Give `model` the weights of this name. The first process that asks for them trains them, the others wait.

    Returns the seconds of CPU time that it took to train them, now or then.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "async-grpo"
    weights = cache / f"{name}-{torch.__version__}.safetensors"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(weights.with_suffix(".lock")):
        if not weights.exists():
            started = time.process_time()
            train()
            unfinished = weights.with_suffix(".unfinished")
            save_model(model, str(unfinished), metadata={"seconds": f"{time.process_time() - started:.1f}"})
            unfinished.replace(weights)
    load_model(model, weights)
    with safe_open(weights, "pt") as file:
        return float((file.metadata() or {}).get("seconds", "nan"))


def learn(
    model: Any, batches: Iterable[tuple[torch.Tensor, torch.Tensor]], *, steps: int, learning_rate: float
) -> None:
    """Supervised learning on `steps` batches: tokens [B, T], and labels [B, T], where -100 is not learnt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.1)
    for _, (tokens_BT, labels_BT) in zip(range(steps), batches, strict=False):
        logits = model(tokens_BT[:, :-1], use_cache=False).logits
        loss: Any = cross_entropy(logits.flatten(0, 1), labels_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
