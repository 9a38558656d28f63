"""Trainers with losses, data and sampling of their users, and a reward model."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Qwen3ForSequenceClassification
from trl import GRPOTrainer

from kit.tiny_trainer import build_model, build_tokenizer


class OwnLoss(GRPOTrainer):
    """A loss like Unsloth's: it replaces `compute_loss`, and takes advantages of either shape."""

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return GRPOTrainer._compute_loss(self, model, inputs)


class OwnForwardPass(GRPOTrainer):
    """A loss with a forward pass of its own."""

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -inputs["completion_ids"].shape[1] - 1 : -1]
        log_pi = logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]
        advantages = inputs["advantages"].view(len(ids), -1)
        return -(advantages * log_pi * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()


class Backwards(GRPOTrainer):
    """Reads the data from its end."""

    def get_train_dataloader(self) -> Any:
        rows = [row for row in reversed(list(self.train_dataset)) for _ in range(self.num_generations)]
        size = self.args.generation_batch_size
        batches = [rows[at : at + size] for at in range(0, len(rows) - size + 1, size)]
        repeats = self.num_iterations * self.args.steps_per_generation
        return DataLoader([batch for batch in batches for _ in range(repeats)], batch_size=1, collate_fn=lambda x: x[0])


class Shortened(GRPOTrainer):
    """Drops the last token of each completion, once."""

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return [ids[:-1] for ids in completion_ids], logprobs and [row[:-1] for row in logprobs]


class ReadsOldLogProbabilities(GRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        output["advantages"] = output["advantages"] - output["old_per_token_logps"].mean(-1)
        return output


def judge() -> Qwen3ForSequenceClassification:
    """A reward model."""
    made = Qwen3ForSequenceClassification(build_model(build_tokenizer(), num_labels=1).config).eval()
    made.load_state_dict(build_model(build_tokenizer(), seed=3).state_dict(), strict=False)
    made.score.weight.data.fill_(0.05)
    return made
