"""Sets a correction on a generation batch that TRL has assembled, and on the inputs of its loss.

TRL's loss multiplies each token by `importance_sampling_ratio`, as it does with use_vllm=True. With one optimizer step
a batch, pi_old is pi: then the weights wait for the log-probabilities that the loss computes anyway, and cost no
forward pass. With several, TRL computes pi_old for its own ratio, and the weights use that.

A loss that is not TRL's (Unsloth's, or one of the user's) gets the weights in its advantages: they are not negative,
so min(r w A, clip(r) w A) = w min(r A, clip(r) A). That needs pi_old in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from async_grpo.errors import UnsupportedError
from async_grpo.training.corrections.effective_share import EffectiveShare
from async_grpo.training.corrections.fresh_batch import FreshBatch
from async_grpo.training.corrections.metrics import Append, Clip, report_clipped, report_ratio, report_weights
from async_grpo.training.corrections.rule import TOKEN, Rule
from async_grpo.training.corrections.weights import limited, loss_mask, ratios

LogProbs = Callable[[dict[str, Any]], Tensor]  # the loss's inputs -> log pi_old, [B, C]


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Sets the correction `rule` on what a trainer trains on.

    Args:
        own_loss: the loss is not TRL's, and is weighed by its advantages.
        clip: how TRL's loss clips ratios; None where it does not.
        log_pi_old: one forward pass without gradient over the batch, for `own_loss` only.
        append: adds a value to the training metrics.
        token_columns: names of further tensors of the batch, each [B, C].
        keeps_old: the user's class sees the batch before it is corrected, and may read what TRL has computed.
        fresh: judges whether trainer and sampler agree.
    """

    rule: Rule
    own_loss: bool
    clip: Clip | None
    log_pi_old: LogProbs
    append: Append
    token_columns: tuple[str, ...] = ()
    keeps_old: bool = False
    share: EffectiveShare | None = None
    fresh: FreshBatch | None = None

    def __call__(self, batch: dict[str, Any]) -> None:
        """Correct a generation batch. `batch["sampling_per_token_logps"]` is log mu, [B, C]."""
        check_shapes(batch, self.token_columns)
        if self.rule.name == "bypass":
            counted = loss_mask(batch)  # for other tokens a rollout_func may say anything; 0 keeps the ratio finite
            batch["old_per_token_logps"] = batch["sampling_per_token_logps"].where(counted, 0.0)
        elif self.rule.weighs and self.own_loss:
            self._weigh_advantages(batch)
        elif self.rule.weighs:
            weights = torch.ones_like(batch["sampling_per_token_logps"])
            batch["importance_sampling_ratio"] = weights if self.rule.level == TOKEN else weights[:, :1].clone()

    def in_loss(self, inputs: dict[str, Any], log_pi: Tensor) -> None:
        """Fill in the weights of a micro-batch, once its forward pass has given log pi, [B, C], without gradient."""
        if self.rule.weighs and "importance_sampling_ratio" in inputs:
            old = inputs.get("old_per_token_logps", log_pi)
            inputs["importance_sampling_ratio"].copy_(self._weights(inputs, old))

    def after_loss(self, inputs: dict[str, Any], log_pi: Tensor, version: int) -> None:
        """Metrics of a micro-batch that was trained on. `log_pi` is of the trainer's `version`."""
        report_ratio(inputs, log_pi, version, self.append)
        if self.fresh is not None:
            self.fresh.saw(inputs, log_pi, version)
        if self.share is not None:
            self.share.saw(inputs, log_pi)
        if self.clip is not None:
            report_clipped(inputs, log_pi, self.clip, self.append)

    def _weigh_advantages(self, batch: dict[str, Any]) -> None:
        old = batch.get("old_per_token_logps")
        batch["old_per_token_logps"] = self.log_pi_old(batch) if old is None else old
        advantages: Tensor = batch["advantages"]
        per_token = advantages[:, None] if advantages.dim() == 1 else advantages
        batch["advantages"] = per_token * self._weights(batch, batch["old_per_token_logps"])

    def _weights(self, batch: dict[str, Any], log_pi_old: Tensor) -> Tensor:
        mask = loss_mask(batch)
        ratio = ratios(log_pi_old, batch["sampling_per_token_logps"], mask, self.rule.level)
        weights = limited(ratio, self.rule)
        report_weights(batch, ratio.expand_as(mask), weights.expand_as(mask), self.append)
        return weights


def check_shapes(batch: dict[str, Any], token_columns: Sequence[str] = ()) -> None:
    """Raise `UnsupportedError` for advantages or columns of tokens that are not there, or spread over the wrong axis.

    TRL's loss takes advantages of shape [B] or [B, C], of B completions with C tokens.
    """
    rows, tokens = batch["completion_ids"].shape
    per_token = ((rows, tokens),)
    allowed = {
        "advantages": ((rows,), (rows, 1), (rows, tokens)),
        **dict.fromkeys(("sampling_per_token_logps", *token_columns), per_token),
    }
    for name, shapes in allowed.items():
        if name not in batch:
            raise UnsupportedError(
                f"The trainer gave no `{name}`. Return from _generate_and_score_completions all that TRL's returns."
            )
        found = tuple(batch[name].shape)
        if found not in shapes:
            raise UnsupportedError(
                f"The trainer gave `{name}` of shape {list(found)} for {rows} completions of {tokens} tokens; "
                f"the loss takes {' or '.join(str(list(shape)) for shape in shapes)}. Correct what "
                "_generate_and_score_completions returns."
            )
