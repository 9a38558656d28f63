"""Guided decoding for a setup file: `return guided(trainer, head="outputs/qsharp/head", eta=0.2)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor
from transformers import LogitsProcessorList

from async_grpo_experiments.guidance.processor import Guidance

OFF = "off"
T = TypeVar("T")


class TrainerGuidance:
    """What `async_grpo` knows of guidance: how its jobs are sampled, and the processors of a batch of them.

    Attributes:
        sampling: what jobs are sampled with where nobody says otherwise, as `Job.sampling` has it.
    """

    def __init__(self, guidance: Guidance) -> None:
        self._guidance = guidance
        self.sampling = {"temperature": guidance.record.temperature, "top_p": 1.0, "top_k": 0, "eta": guidance.eta}

    def processors(
        self,
        sampling: Mapping[str, Any],
        model: Any,
        tokenizer: Any,
        *,
        attention_mask: Tensor | None,
        temperature: float,
    ) -> LogitsProcessorList:
        """The processors of one batch; `Guidance.processors` says what it refuses.

        Args:
            sampling: as `Job.sampling` has it; `eta` may be "off".
        """
        eta = sampling.get("eta")
        if eta == OFF:
            return LogitsProcessorList()
        return self._guidance.processors(
            model, tokenizer, attention_mask=attention_mask, temperature=temperature, eta=eta
        )


def guided(
    trainer: T,
    *,
    head: str | Path,
    eta: float | None = None,
    inverse_eta: float | None = None,
    mode: str | None = None,
    top_k: int = 20,
    use_cache: bool = True,
) -> T:
    """Have workers decode this trainer's evaluations by a head. The trainer is not changed otherwise.

    Args:
        trainer: a `GRPOTrainer`.
        head: the folder. It and the others are as `Guidance` has them, which says what is refused.

    Raises:
        UsageError: an argument cannot be used, or the folder holds no head.
        RunRefused: the head is of another tokenizer.
        BadFileError: the head's files are damaged.
    """
    guidance = Guidance(
        head=Path(head).absolute(), eta=eta, inverse_eta=inverse_eta, mode=mode, top_k=top_k, use_cache=use_cache
    )
    user: Any = trainer
    guidance.check_tokenizer(user.processing_class)
    user.guidance = TrainerGuidance(guidance)
    return trainer
