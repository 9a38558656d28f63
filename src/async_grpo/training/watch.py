"""Sees what callbacks and overrides change, in the server, of that which workers have from the setup file.

Asked before each job is issued: a change of the sampling goes with the job, any other ends the run with a sentence.
"""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from async_grpo.errors import RunRefused
from async_grpo.setup.generator_choice import Capabilities
from async_grpo.setup.sampling_changes import SamplingChanges
from async_grpo.setup.trl_compat import is_adapter

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read by TRL while it is built
_OF_TRAINER = (
    *(*_SAMPLING, "num_generations", "num_iterations", "chat_template", "chat_template_kwargs", "rollout_func"),
    *("reward_funcs", "tools", "environment_factories"),
)
_OF_CONFIG = (
    *(*_SAMPLING, "max_completion_length", "generation_kwargs", "num_generations"),
    *("steps_per_generation", "gradient_accumulation_steps", "generation_batch_size"),
)
_READ_ONCE = {
    *(f"{owner}.{name}" for owner in ("trainer", "trainer.args") for name in _SAMPLING),
    *("trainer.args.max_completion_length", "trainer.args.generation_kwargs"),
}
_WITH_TOOLS = ("max_completion_length", "max_tool_calling_iterations")
_OF_ADAPTERS = ("scaling", "active_adapters", "disable_adapters", "merged_adapters")  # of each layer of PEFT's
_LARGEST_BUFFER = 2**16  # numbers in one that is compared; larger ones are quantised weights


class Watch:
    """Compares the trainer with what it was when this object was made. `engine` is None where it is not known."""

    def __init__(self, trainer: Any, *, engine: Capabilities | None, max_staleness: int) -> None:
        self._trainer = trainer
        self._before = {**dict(_values(trainer)), **dict(_of_adapters(trainer.model))}
        self._buffers = {name: buffer.detach().clone() for name, buffer in _saved_buffers(trainer.model)}
        self._step: int | None = None  # at which they were compared
        self._sampling = SamplingChanges(trainer, engine=engine, max_staleness=max_staleness)

    def sampling(self) -> dict[str, Any]:
        """What differs by now of that which jobs are sampled with.

        Raises:
            RunRefused: something has changed that workers cannot follow.
        """
        self._refuse_changed(_values(self._trainer))
        if self._step != self._trainer.state.global_step:
            self._step = self._trainer.state.global_step
            self._refuse_changed(_of_adapters(self._trainer.model))
            self._refuse_changed_buffers()
        return self._sampling.of(self._trainer)

    def _refuse_changed(self, values: Iterable[tuple[str, Any]]) -> None:
        for name, now in values:
            before = self._before.get(name)
            if now != before:
                was, is_now = reprlib.repr(before), reprlib.repr(now)  # a reward model would print its layers
                raise RunRefused(
                    f"{name} has changed during the run, from {was} to {is_now}. Workers and the "
                    f"schedule of jobs have it as the setup file set it. {_way_out(name)}"
                )

    def _refuse_changed_buffers(self) -> None:
        """Only parameters are published. A buffer that was moved or cast, as DeepSpeed does, counts as the same."""
        for name, buffer in _saved_buffers(self._trainer.model):
            before = self._buffers.get(name)
            if before is None or not torch.equal(before.to(buffer), buffer):
                raise RunRefused(
                    f"The buffer {name} of the model has changed during the run. Workers get the parameters that train "
                    "and no buffers, so they would sample with the value that the setup file gave it. Leave it as it "
                    "is, or train in one process (without --distributed)."
                )


def _saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint has and that are no weights. Of others, such as frequencies, forward passes decide."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix=prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set and buffer.numel() <= _LARGEST_BUFFER:
                yield name, buffer


def _way_out(name: str) -> str:
    alone = "train in one process (without --distributed)"
    if name in _READ_ONCE:
        return (
            "TRL reads it while it builds the trainer and never again, so plain TRL would not follow it either. What "
            "is sampled with is trainer.generation_config: change that."
        )
    if name == "trainer.max_completion_length":
        return f"What TRL samples with is trainer.generation_config: change that, or {alone}."
    return f"Set it in the setup file, or {alone}."


def _values(trainer: Any) -> Iterator[tuple[str, Any]]:
    with_tools = _WITH_TOOLS if trainer.tools or trainer.environment_factories else ()
    owners = (("trainer", trainer, (*_OF_TRAINER, *with_tools)), ("trainer.args", trainer.args, _OF_CONFIG))
    for owner, it, names in owners:
        for name in names:
            value = getattr(it, name, None)
            is_changed_in_place = isinstance(value, (list, dict))  # a copy of a function object is not equal to it
            yield f"{owner}.{name}", copy.copy(value) if is_changed_in_place else value
    yield "chat_template of the tokenizer", getattr(trainer.processing_class, "chat_template", None)


def _of_adapters(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for path, module in model.named_modules() if is_adapter(model) else ():
        for name in _OF_ADAPTERS if hasattr(module, "merged_adapters") else ():
            yield f"{name} of {path}", copy.copy(getattr(module, name, None))
