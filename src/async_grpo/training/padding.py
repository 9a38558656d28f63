"""A training step that computes no padding, around TRL's own code.

TRL pads the rows of a generation batch to the longest prompt and the longest completion, and never takes the padding
away. Here its log-probabilities are computed in `pieces`, each without padding, and put back into TRL's shape: its loss
sees what it always saw. Rows change places only among the micro-batches of one optimizer step, where the loss is a sum
over rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from async_grpo.images import MODEL_INPUTS
from async_grpo.settings import NO_PADDING
from async_grpo.setup.algorithm import gradients_besides
from async_grpo.setup.pieces import Pieces
from async_grpo.setup.replaced import adapter, class_of_trl, classes_of_trl, is_of_ours, replaced
from async_grpo.tasks.gradients import OF_BATCHES, OF_ROWS, joined, not_sums, rows_of

if TYPE_CHECKING:
    from trl import GRPOTrainer as UserTrainer
else:  # the user's class takes this place at run time
    UserTrainer = object

METRIC = "async/padding_fraction"
COMPILED = 64  # compiled models are given multiples of so many columns
_LOG_PROBS = "_get_per_token_logps_and_entropies"
_SEE_MICRO_BATCHES = frozenset({"_prepare_inputs", "training_step", "compute_loss", "_compute_loss"})


@adapter
class Unpadded(UserTrainer):
    """Put before `GRPOTrainer`, or a class of it, to train on the same loss without computing padding.

        class Trainer(Unpadded, GRPOTrainer): ...

    A run does so by itself (`--padding`). What is computed as TRL does is in docs/trl.md.
    """

    padding: str = NO_PADDING
    tokens_computed = tokens_there = 0  # of all micro-batches that were trained on
    _pieces: Pieces | None = None
    _buffered_inputs: Any  # of TRL

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        ask = super()._get_per_token_logps_and_entropies
        if attention_mask is None:  # Unsloth's first question
            return ask(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        pieces = self._pieces_for(kwargs) if logits_to_keep and not args else None
        if pieces is None:
            answers = ask(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            computed = attention_mask.numel()
        else:
            most_rows = kwargs.pop("batch_size", None)

            def compute(ids: torch.Tensor, mask: torch.Tensor, asked: torch.Tensor, keep: int) -> Any:
                def attending(attention_mask: Any, **inputs: Any) -> Any:
                    return model(attention_mask=mask, **inputs)

                return ask(attending, ids, asked, keep, **kwargs)  # TRL answers the tokens of its mask

            answers, computed = pieces(model, compute, input_ids, attention_mask, logits_to_keep, most_rows)
        if self.model.training and torch.is_grad_enabled():
            self.tokens_computed += computed
            self.tokens_there += (there := int(attention_mask.sum()))
            self._metrics["train"][METRIC].append(computed / max(1, there))
        return answers

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._buffered_inputs is before:
            return inputs
        self._buffered_inputs = dealt_by_length(self._buffered_inputs, exchanging(self))
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def stays_whole(self) -> bool:
        """Whether a batch has to be computed whole now."""
        return False

    def _pieces_for(self, asked: Mapping[str, Any]) -> Pieces | None:
        """What computes a call with these arguments in pieces; None: it is computed whole."""
        mixes_rows = asked.get("compute_aux_loss") or any(asked.get(name) is not None for name in MODEL_INPUTS)
        if mixes_rows or self.stays_whole():
            return None
        if self._pieces is None and computes_pieces(self):
            multiple = COMPILED if self.args.torch_compile else self.args.pad_to_multiple_of or 1
            self._pieces = Pieces(self.accelerator, multiple)
        return self._pieces


def computes_pieces(trainer: Any) -> bool:
    """Whether this trainer's log-probabilities may be computed in pieces."""
    args, ranks = trainer.args, trainer.accelerator.num_processes > 1
    reentrant = args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    return (
        trainer.padding == NO_PADDING
        and _LOG_PROBS not in replaced(trainer)
        and class_of_trl(trainer) in classes_of_trl()  # not Unsloth's
        and not (ranks and reentrant)  # DDP takes one gradient of each parameter
        and not (ranks and hasattr(trainer.processing_class, "image_processor"))  # one may have no images
    )


def exchanging(trainer: Any) -> int:
    """How many micro-batches after one another are of one optimizer step and may exchange rows; 1: none."""
    batch, step = int(trainer.args.steps_per_generation), int(trainer.args.gradient_accumulation_steps)
    if (
        min(batch, step) == 1
        or not computes_pieces(trainer)
        or any(name in _SEE_MICRO_BATCHES and not is_of_ours(value) for name, value in replaced(trainer).items())
        or trainer.loss_type not in (*OF_ROWS, *OF_BATCHES)
        or any(not_sums(trainer).values())
        or gradients_besides(trainer)  # micro-batches with rows of each task
    ):
        return 1
    return min(batch, step) if max(batch, step) % min(batch, step) == 0 else 1


def dealt_by_length(batches: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Deal the rows of each `count` micro-batches to them by length, the longest first."""
    rows = len(batches[0]["completion_ids"])
    columns = [value for value in batches[0].values() if isinstance(value, list) or getattr(value, "ndim", 0) > 0]
    if count == 1 or batches[0].keys() & set(MODEL_INPUTS) or any(len(column) != rows for column in columns):
        return list(batches)
    dealt: list[dict[str, Any]] = []
    for start in range(0, len(batches), count):
        whole = joined(batches[start : start + count])
        lengths = whole["prompt_mask"].sum(1) + whole["completion_mask"].sum(1)
        dealt += [rows_of(whole, part) for part in lengths.argsort(descending=True, stable=True).chunk(count)]
    return dealt
