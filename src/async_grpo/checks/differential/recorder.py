"""Recorders of what is trained on, in the server and in plain TRL, and of what is sampled, in the worker.

Every private name of TRL's trainer that is recorded is in `HOOKS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from async_grpo.checks.differential.notes import PLAIN, SERVER, WORKER, Notes, noted
from async_grpo.checks.differential.user_code import note_callbacks, note_methods, note_rewards_and_tools
from async_grpo.setup.replaced import adapter
from async_grpo.training.padding import Unpadded, exchanging

HOOKS = ("compute_loss", "_get_per_token_logps_and_entropies")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_completion_length")


def recorded_run(trainer: Any, scratch: Path) -> None:
    """Have the process of a run note what it does with this trainer.

    The server notes what it trains on; a worker what its engine samples, and from its making on what the user's code
    is given.
    """
    from async_grpo.rollout import engine_choice

    trainer.callback_handler.callbacks.insert(0, TrainingRecorder(trainer, Notes(scratch, SERVER)))
    make, notes = engine_choice.make_engine, Notes(scratch, WORKER)

    def make_recorded(trl: Any, *args: Any, **kwargs: Any) -> Any:
        engine: Any = make(trl, *args, **kwargs)
        note_rewards_and_tools(trl.trainer, notes)
        note_methods(trl.trainer, notes)
        engine.sample = _noting(engine.sample, trl.trainer, notes)
        return engine

    engine_choice.make_engine = make_recorded


def _noting(sample: Callable[[Any], Any], trainer: Any, notes: Notes) -> Callable[[Any], Any]:
    def sample_and_note(new: Sequence[Any]) -> Any:
        if new:
            note_sampling(trainer, notes)
        ended = sample(new)
        for group in (group for group in ended if group.error is None):
            at = group.prepared
            for index, (prompt, tokens) in enumerate(zip(at.prompt_ids, group.tokens, strict=True)):
                position = [at.job.seq, at.turn, at.first_index + index]
                notes.add("sampled", at=position, prompt_ids=prompt, token_ids=tokens.ids)
        return ended

    return sample_and_note


def note_sampling(trainer: Any, notes: Notes) -> None:
    """Note with which settings TRL's trainer would sample now."""
    settings = {f"trainer.{name}": getattr(trainer, name, None) for name in _SAMPLING}
    settings |= {f"generation_config.{name}": value for name, value in trainer.generation_config.to_dict().items()}
    for name, value in settings.items():
        notes.add("setting", of=name, value=noted(value))


class TrainingRecorder(TrainerCallback):
    """Notes batches, losses, gradients, metrics and the weights that come out; with the first event, the user's code.

    It is the first of the callbacks. By that event the run has checked the trainer and given it a class of its own.
    """

    def __init__(self, trainer: Any, notes: Notes) -> None:
        self._trainer, self._notes = trainer, notes

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self._notes.role == PLAIN:  # the rewards of a run are called in its worker
            note_rewards_and_tools(self._trainer, self._notes)
        note_callbacks(self._trainer, self._notes)
        note_methods(self._trainer, self._notes)
        self._trainer.__class__ = recorded_class(type(self._trainer), self._notes)

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **kwargs: Any) -> None:
        trained = [(name, it.grad) for name, it in self._trainer.model.named_parameters() if it.grad is not None]
        self._notes.add("gradient", step=state.global_step + 1, numbers={name: _norm(grad) for name, grad in trained})

    def on_log(self, args: Any, state: Any, *_: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        numbers = {name: float(it) for name, it in (logs or {}).items() if isinstance(it, (int, float))}
        self._notes.add("log", step=state.global_step, numbers=numbers)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        trained = [(name, it) for name, it in self._trainer.model.named_parameters() if it.requires_grad]
        self._notes.add("weights", numbers={name: _norm(it) for name, it in trained})
        if isinstance(self._trainer, Unpadded):
            self._notes.add("padding", computed=self._trainer.tokens_computed, exchanging=exchanging(self._trainer))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double()))


@contextmanager
def _drawn_apart(own: list[torch.Tensor]) -> Iterator[None]:
    """Inside, a CPU's random numbers go on from the state `own`: drawn from torch's, they would change a shuffle."""
    with torch.random.fork_rng(devices=[]):
        torch.random.set_rng_state(own.pop())
        yield
        own.append(torch.random.get_rng_state())


def recorded_class(kind: type, notes: Notes) -> type:
    """The trainer's class, which also notes each batch with the log-probabilities and the loss of it."""
    own = [torch.Generator().manual_seed(0).get_state()]

    @adapter
    class Recorded(kind):
        _logprobs: torch.Tensor | None = None

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not model.training:
                return super().compute_loss(model, inputs, *args, **kwargs)
            batch = {name: it.detach().cpu().clone() for name, it in inputs.items() if isinstance(it, torch.Tensor)}
            self._logprobs, drawn = None, noted(own)[0]
            with _drawn_apart(own):
                loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self._logprobs is not None:
                batch["logprobs"] = self._logprobs
            notes.add_batch(batch)
            numbers = {"loss": float(loss.detach())}
            notes.add("loss", step=int(self.state.global_step) + 1, numbers=numbers, drawn=drawn)
            return loss

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            with _drawn_apart(own) if own else nullcontext():  # not again within a loss
                result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self._logprobs = result[0].detach()
            return result

    Recorded.__name__ = Recorded.__qualname__ = kind.__name__
    return Recorded
