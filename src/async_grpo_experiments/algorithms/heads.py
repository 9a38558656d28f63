"""Training of a value head on labelled rows, by transformers' `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, Trainer, TrainingArguments

from async_grpo.errors import UsageError
from async_grpo.log import logger
from async_grpo_experiments.algorithms.protocols import Cut, HeadSettings, Plan, Trained
from async_grpo_experiments.algorithms.rows import LabelledRow, Rows, cuts_of, number_of_problems
from async_grpo_experiments.algorithms.training import arguments, check_lengths, fit, load_policy
from async_grpo_experiments.guidance.head import HeadOutput, HeadRecord, ValueHead
from async_grpo_experiments.guidance.offsets import check_mode

UNLABELLED = -100.0  # what transformers leaves out when it counts the labels of a batch
WARN_NATS = 0.25  # that rounding to atoms may cost
_Settings = TypeVar("_Settings", bound=HeadSettings)


def train_head(
    settings: HeadSettings,
    rows: Rows,
    start: Path | None,
    out: Path,
    *,
    kind: Literal["value", "preference"] = "value",
    beta: float = 1.0,
) -> Trained:
    """Train a head on the rows, and save it in `out/head`.

    Args:
        start: the head of the round before; None: zeros, on the backbone of `settings.value` or of the reference.
        kind: what the labels are.
        beta: of the preferences that the labels are made by.
    """
    head = _head(settings, start, kind, beta)
    if settings.gradient_checkpointing:
        head.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    check_lengths(rows, head.backbone.config)
    groups = rows.groups()
    is_paired = settings.loss_type == "bradley_terry"

    def loss(outputs: HeadOutput, labels_BT: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """The part that this micro-batch has in the mean over the tokens, or pairs, of the batch."""
        mask_BT = labels_BT != UNLABELLED
        pairs = torch.arange(len(labels_BT), device=labels_BT.device).view(-1, 2) if is_paired else None
        items = len(labels_BT) if is_paired else mask_BT.sum()
        return head.loss(outputs.logits, labels_BT, mask_BT, pairs) * items / num_items_in_batch

    trainer = (PairTrainer if is_paired else Trainer)(
        head,
        TrainingArguments(**arguments(settings, out, max(map(len, groups))), remove_unused_columns=False),
        data_collator=collate,
        train_dataset=groups,
        compute_loss_func=loss,
    )
    return fit(trainer, out / "head", head.save)


class ValueGuided(Generic[_Settings]):
    """An algorithm whose head decoding adds to the reference: Q#, QSharp-HF, PITA."""

    def __init__(self, settings: _Settings) -> None:
        check_mode(settings.guidance.mode, settings.loss_type)
        self.settings = settings

    def plan(self, problems: int, round_number: int = 1) -> Plan:
        """A sampled roll-in of each problem, guided from round 2 on; then continuations of one cut, from π."""
        wanted = range(number_of_problems(self.settings, problems))
        roll_ins = yield [Cut(problem=problem, guided=round_number > 1) for problem in wanted]
        cuts = cuts_of(roll_ins, self.settings.seed, round_number)
        yield [replace(cut, count=self.settings.samples_per_example) for cut in cuts]

    def guidance(self) -> dict[str, Any]:
        """Keywords of `guided` besides the head: `eta`, `mode`, `top_k`, `use_cache`."""
        return self.settings.guidance.keywords()


class PairTrainer(Trainer):
    """Counts the rows of a batch, where transformers counts tokens: the last batch of an epoch has fewer."""

    def get_batch_samples(self, *args: Any, **more: Any) -> tuple[list[Any], int]:
        batches, _ = super().get_batch_samples(*args, **more)
        return batches, sum(len(batch["labels"]) for batch in batches)


def _head(settings: HeadSettings, start: Path | None, kind: str, beta: float) -> ValueHead:
    reference = load_policy(settings.reference, settings)
    tokenizer = AutoTokenizer.from_pretrained(settings.reference)
    record = HeadRecord.of(
        reference,
        tokenizer,
        kind=kind,
        loss=settings.loss_type,
        num_atoms=settings.num_atoms,
        v_min=settings.V_min,
        v_max=settings.V_max,
        temperature=settings.temperature,
        beta=beta,
    )
    if start is None:
        backbone = reference if settings.value is None else load_policy(settings.value, settings)
        return ValueHead.beginning_from(backbone, record, tokenizer)
    head = ValueHead.load(start)
    before, now = asdict(head.record), asdict(record)
    for name in (field.name for field in fields(record) if field.name not in ("weights_hash", "tokenizer", "model")):
        if before[name] != now[name]:
            raise UsageError(
                f"The head in {start} has {name} {before[name]}, and this training {now[name]}: a round has what "
                "the one before it had, or begins without a head."
            )
    return head


def collate(groups: Sequence[Sequence[LabelledRow]]) -> dict[str, Tensor]:
    """The rows of whole groups, padded on the right, as `ValueHead.forward` takes them, and their labels."""
    rows = [row for group in groups for row in group]
    ids = [torch.tensor(row.tokens, dtype=torch.long, device="cpu") for row in rows]
    labels = [torch.full_like(one, UNLABELLED, dtype=torch.float32) for one in ids]
    for row, of_row in zip(rows, labels, strict=True):
        of_row[row.unlabelled :] = row.label
    columns = {"input_ids_BT": ids, "attention_mask_BT": [torch.ones_like(one) for one in ids], "labels": labels}
    return {name: pad_sequence(column, True, UNLABELLED if name == "labels" else 0) for name, column in columns.items()}


def check_returns(rows: Rows, settings: HeadSettings) -> None:
    """Refuse a reward that the head has no place for, and say what rounding to atoms costs."""
    low, high, eta = settings.V_min, settings.V_max, settings.guidance.strength
    for index, row in enumerate(rows.items):
        where = f"row {index} (problem {row.problem}) has the reward {row.label:g}"
        if not low <= row.label <= high:
            raise UsageError(f"{where}, outside of V_min {low:g} and V_max {high:g}: set them to the reward's bounds.")
        if settings.guidance.mode == "bernoulli" and row.label not in (low, high):
            raise UsageError(
                f"{where}, and bernoulli is for rewards that are V_min {low:g} or V_max {high:g}: set loss_type mle "
                "and guidance.mode histogram, or V_min and V_max."
            )
    if settings.guidance.mode == "bernoulli":
        logger.info("(V_max - V_min)/eta is {:.3g}: the most that guidance adds to a logit.", (high - low) / eta)
    if settings.loss_type == "mle":
        step = (high - low) / (settings.num_atoms - 1)
        off = max(abs((row.label - low) / step - round((row.label - low) / step)) * step for row in rows.items) / eta
        say = logger.warning if off > WARN_NATS else logger.info
        say("Rounding rewards to {} atoms costs up to {:.3g} nats at eta {:g}.", settings.num_atoms, off, eta)
