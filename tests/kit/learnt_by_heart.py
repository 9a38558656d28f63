"""Tiny models that have learnt by heart what a script says, so that real runs call tools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from async_grpo.engines import PreparedGroup, SampledGroup
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_model, build_tokenizer, build_trainer

ENOUGH = 0.02  # mean loss at which greedy decoding repeats what was learnt
MOST_STEPS = 800

Said = list[tuple[list[int], list[int]]]  # prompts, of which each has the one before, and what was said to them


class Scripted(ScriptedEngine):
    """Says to every completion's next turn the next of `answers`, and keeps what the first completion was asked."""

    def __init__(self, tokenizer: Any, answers: Sequence[str]) -> None:
        left, answer = iter(answers), [""]

        def reply(prompt: str, index: int) -> str:
            if index == 0:
                answer[0] = next(left)
            return answer[0]

        super().__init__(ScriptedGenerator(reply, tokenizer))
        self.said: Said = []

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        sampled = super().sample(new)
        self.said += [(turn.prepared.prompt_ids[0], turn.tokens[0].ids) for turn in sampled]
        return sampled


def played(trainer: Any, answers: Sequence[str], row: dict[str, Any], group_size: int) -> Said:
    """A dialogue about this row, in which the model says these answers."""
    script = Scripted(trainer.processing_class, answers)
    InProcessWorker(trainer, script).generate(jobs_of([row], group_size))
    return script.said


def learn(model: Any, said: Said) -> None:
    """Have the model learn by heart what was said, of which the last prompt has all before it."""
    prompt, answer = said[-1]
    ids = torch.tensor([prompt + answer])
    labels = torch.full_like(ids, -100)
    for asked, told in said:
        labels[0, len(asked) : len(asked) + len(told)] = torch.tensor(told)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for _ in range(MOST_STEPS):
        loss = model(input_ids=ids, labels=labels).loss
        if loss.item() < ENOUGH:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < ENOUGH, f"the model did not learn its answers: loss {loss.item():.3f}"
    model.eval()
    model.training = True  # TRL reads it as "this is a training batch"


def write_learnt(trainer: Any, answers: Sequence[str], row: dict[str, Any], group_size: int, path: Path) -> None:
    """Write the weights of a model that says these answers to the row."""
    learn(trainer.model, played(trainer, answers, row, group_size))
    save_file({name: tensor.detach().clone() for name, tensor in trainer.model.named_parameters()}, path)


def build_actor(train_dataset: Any, reward_funcs: Any, **arguments: Any) -> Any:
    """The trainer of a setup file whose tiny model calls tools; LEARNT names its weights. `arguments`: of TRL's."""
    trainer = build_trainer(
        Path("outputs"),
        model=build_model(build_tokenizer(), hidden_size=64, head_dim=32, intermediate_size=192),
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=train_dataset,
        reward_funcs=reward_funcs,
        arguments=arguments,
        max_completion_length=250,
        max_steps=6,
        per_device_train_batch_size=2,
        temperature=0.3,
    )
    if "LEARNT" in os.environ:
        trainer.model.load_state_dict(load_file(os.environ["LEARNT"]), strict=False)  # what is tied is there once
    return trainer
