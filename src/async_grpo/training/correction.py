"""Off-policy correction: what the loss takes as the old log-probabilities of a rollout."""

from __future__ import annotations

from typing import Any


def bypass(batch: dict[str, Any]) -> None:
    """Take the sampler's log-probabilities as the old ones, so that the ratio is against the policy that sampled.

    PPO's clip then bounds the step away from the sampler, however stale it is; no third forward pass is needed
    (the "bypass" mode of verl's fully asynchronous trainer, and the loss of TRL's `async_grpo`).

    `batch["sampling_per_token_logps"]`: [B, C], natural log.
    """
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"]
