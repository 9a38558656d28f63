"""Train with TRL 1.15 on a CPU, or tokens of a tied head, and what both sides of a run ask about a trainer's model.

TRL 1.15 computes log-probabilities with a Triton kernel only; TRL 1.16 has the same function in plain torch for
machines without a GPU. `TorchLogProbs` does it for 1.15. The private names are TRL's `_ChunkedLogProbFunction`, with
`_use_triton`, by which its caller chooses the tokens, and `maybe_gather_lm_head_ctx`, in which it computes its
gradient, and `_load_best_model` of transformers' trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

FIXED_IN = "1.16"


def is_adapter(model: Any) -> bool:
    """Whether the model is PEFT's, so that only an adapter of it is trained and saved."""
    return hasattr(model, "peft_config")


class AllStepsDone(Exception):
    """Ends a training before it begins, where the checkpoint is at the last step: transformers would train one more."""


def train_the_rest(trainer: Any, checkpoint: Path | None) -> bool:
    """Train from a checkpoint on, or from the beginning. False where a callback has raised `AllStepsDone`."""
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except AllStepsDone:
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint is not None:
            trainer._load_best_model()  # which a training leaves, where the setup file asks for it
        return False
    return True


def repair_trl() -> None:
    """Put in place `TorchLogProbs`, where this TRL needs it, and the bias of a tied head. Harmless to call twice."""
    import trl
    from packaging.version import Version
    from peft.utils.other import TrainableTokensWrapper
    from trl.trainer import utils

    # `trainable_token_indices` wraps a head that is tied, and TRL's loss reads the head's bias, which PEFT hides.
    TrainableTokensWrapper.bias = property(lambda head: head.original_module.bias)
    if not torch.cuda.is_available() and Version(trl.__version__) < Version(FIXED_IN):
        utils._ChunkedLogProbFunction = TorchLogProbs


@contextmanager
def log_probs_by(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Inside this block, TRL's models compute log-probabilities by `wrap(function)` in place of `function`.

    It gets the tokens of completions that are not masked, row by row, on every device.
    """
    from trl.trainer import utils

    of_trl = {name: vars(utils)[name] for name in ("_ChunkedLogProbFunction", "_use_triton") if name in vars(utils)}
    utils._ChunkedLogProbFunction = wrap(utils._ChunkedLogProbFunction)
    if "_use_triton" in of_trl:  # TRL 1.16 computes all other tokens as well where there is no Triton
        utils._use_triton = lambda device: True
    try:
        yield
    finally:
        vars(utils).update(of_trl)


def whole_head(weight: Tensor, bias: Tensor | None) -> AbstractContextManager[Any]:
    """Inside this block the head of a model is whole, in the backward pass too, where ZeRO-3 shards it."""
    if not hasattr(weight, "ds_status"):
        return nullcontext()
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    return maybe_gather_lm_head_ctx(weight, bias)


class TorchLogProbs:
    """Per-token log-probabilities and statistics of `hidden @ weight.T`, differentiable, with full logits [N, V]."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [N, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,  # [V]
        targets: Tensor,  # [N]
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = (),
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Returns log-probabilities [N], then entropy, log(sum p^2), mean logit and is-argmax, each [N] or None."""
        device = hidden.device.type
        # As in TRL's kernel: that of autocast, else of what goes into the head, which in Mamba-2 in bf16 is fp32.
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        logits_NV = linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        logits_NV = logits_NV.float() * logit_scale
        if softcap is not None:
            logits_NV = softcap * torch.tanh(logits_NV / softcap)
        logits_NV = logits_NV / temperature
        logprobs_NV = torch.log_softmax(logits_NV, dim=-1)
        return (
            logprobs_NV.gather(1, targets[:, None])[:, 0],
            -(logprobs_NV.exp() * logprobs_NV).sum(-1) if "entropy" in outputs else None,
            torch.logsumexp(2 * logprobs_NV, dim=-1).detach() if "log_sum_sq_probs" in outputs else None,
            logits_NV.mean(-1).detach() if "mean_logits" in outputs else None,
            logits_NV.argmax(-1) == targets if "is_top1" in outputs else None,
        )
