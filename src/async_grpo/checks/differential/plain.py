"""Plain TRL in a process of its own, on the completions that the run's worker has sampled and scored.

Its rewards are called and noted, but what it trains on are the worker's scores: a reward that differs is one line of
the check, and does not make all that comes after it differ. The private names of TRL's trainer that are replaced are
in `HOOKS`.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_grpo.checks import probe
from async_grpo.checks.differential.checked_trainer import OUTPUT, RUN, STEPS, CheckOptions, user_trainer
from async_grpo.checks.differential.notes import PLAIN, WORKER, Note, Notes, noted, notes_of, shown
from async_grpo.errors import UnsupportedError

HOOKS = ("_generate_single_turn", "_calculate_rewards")
_PROBES = {"first": 0, "again": 0, "otherwise": 1}  # a call of a reward by what it is, and its seed


def train(question: dict[str, Any]) -> None:
    """Train the file's trainer as TRL does; the notes and what it writes are in the scratch folder."""
    from async_grpo.setup.devices import hold_to_device
    from async_grpo.setup.process import make_deterministic

    options = CheckOptions(**question)
    scratch = Path(options.scratch)
    hold_to_device(options.device, os.environ)
    make_deterministic()
    trainer = user_trainer(options, scratch / OUTPUT / PLAIN, engine_here=False, steps=STEPS, seed=options.seed)
    from async_grpo.checks.differential.recorder import TrainingRecorder

    notes, made, functions = Notes(scratch, PLAIN), notes_of(scratch, WORKER), [*trainer.reward_funcs]
    trainer.callback_handler.callbacks.insert(0, TrainingRecorder(trainer, notes))
    if trainer.rollout_func is not None and not any(note["kind"] == "sampled" for note in made):
        trainer.rollout_func = _recorded_rollouts(made)
    _replace_sampling(trainer, _sampled(made), notes)
    scores = WorkersScores(scratch / RUN)
    trainer.__class__ = _scored_class(type(trainer), scores, notes)
    trainer.train()
    _call_again(trainer, functions, scores.first_inputs, notes)


def _sampled(made: Sequence[Note]) -> dict[tuple[int, ...], deque[list[int]]]:
    """The tokens that the worker sampled after each prompt, in the order of the jobs."""
    found: dict[tuple[int, ...], deque[list[int]]] = defaultdict(deque)
    for note in sorted((note for note in made if note["kind"] == "sampled"), key=lambda note: note["at"]):
        found[tuple(note["prompt_ids"])].append(note["token_ids"])
    return found


def _recorded_rollouts(made: Sequence[Note]) -> Callable[[list[Any], Any], dict[str, list[Any]]]:
    """A `rollout_func` that returns for each prompt what the worker's has returned, which has sampled by itself."""
    left: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
    for note in (note for note in made if note["kind"] == "rollouts"):
        size, output = len(note["prompts"]), note["output"]
        for index, prompt in enumerate(note["prompts"]):
            each = (it[index] if isinstance(it, list) and len(it) == size else it for it in output.values())
            left[prompt].append(dict(zip(output, each, strict=True)))

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        found = [left[noted(prompt)[0]] for prompt in prompts]
        if missing := [prompt for prompt, rows in zip(prompts, found, strict=True) if not rows]:
            raise UnsupportedError(f"rollout_func made no completion of {shown(missing[0])} in the worker.")
        rows = [rows.popleft() for rows in found]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return rollout_func


def _replace_sampling(trainer: Any, sampled: dict[tuple[int, ...], deque[list[int]]], notes: Notes) -> None:
    """Where TRL's trainer would sample, it gets the worker's tokens. An override of the user's is above that."""
    from trl import GRPOTrainer

    from async_grpo.checks.differential.recorder import note_sampling
    from async_grpo.setup.replaced import patched

    name = "_generate_single_turn"
    sample, is_patched = GRPOTrainer._generate_single_turn, name in patched(trainer)

    def replayed(self: Any, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        if not self.model.training:
            return sample(self, prompt_ids, *args, **kwargs)
        if is_patched:  # it is not called, as that would sample, and would be in TRL
            notes.add("method", of=name, items=[noted(ids) for ids in prompt_ids], size=len(prompt_ids))
        note_sampling(self, notes)
        left = [sampled[tuple(ids)] for ids in prompt_ids]
        found = [tokens.popleft() if tokens else None for tokens in left]
        lost = [ids for ids, tokens in zip(prompt_ids, found, strict=True) if tokens is None]
        notes.add("prompts", asked=len(found), unknown=[noted(self._tokenizer.decode(ids))[1] for ids in lost])
        return [[self.eos_token_ids[0]] if tokens is None else [*tokens] for tokens in found], None

    GRPOTrainer._generate_single_turn = replayed


class WorkersScores:
    """Rewards of the groups in the order in which the run trained on them, and the first group's inputs in TRL."""

    def __init__(self, run_dir: Path) -> None:
        from async_grpo.archive.groups import FinishedGroups, UsedStep

        steps = [entry for entry in FinishedGroups(run_dir).news() if isinstance(entry, UsedStep)]
        self._rows = [row for step in steps for found in step.groups for row in found.group.rewards.tolist()]
        self._taken = 0
        self.first_inputs: tuple[Any, ...] | None = None

    def take(self, count: int) -> list[list[float]]:
        self._taken += count
        return self._rows[self._taken - count : self._taken]


def _scored_class(kind: type, scores: WorkersScores, notes: Notes) -> type:
    """The trainer's class, which calls its own rewards and trains on the worker's scores."""
    import torch

    class Scored(kind):
        def _calculate_rewards(self, inputs: Any, *batch: Any) -> Any:
            if scores.first_inputs is None:
                scores.first_inputs = tuple([*it[: self.num_generations]] for it in (inputs, *batch))
            own = self.own_scores(inputs, *batch)
            theirs = torch.tensor(scores.take(len(own)), dtype=own.dtype, device=own.device)
            notes.add("scores", plain=own.tolist(), worker=theirs.tolist())
            return theirs if theirs.shape == own.shape else own

        def own_scores(self, *batch: Any) -> Any:
            return super()._calculate_rewards(*batch)

    Scored.__name__ = Scored.__qualname__ = kind.__name__
    return Scored


def _call_again(trainer: Any, functions: Sequence[Any], inputs: tuple[Any, ...] | None, notes: Notes) -> None:
    """Call what differs on one group, as the worker does: rewards twice with equal random numbers, once with others."""
    from async_grpo.checks.differential.scored import SCORING, differing_rewards

    if inputs is None or trainer.environments is not None:
        return
    plain = notes_of(notes.folder, PLAIN)
    notes.keep_only("probe")
    for name in differing_rewards(notes_of(notes.folder, WORKER), plain):
        function = functions[trainer.reward_func_names.index(name)]
        for what, seed in _PROBES.items():
            notes.add("probe", of=name, what=what, values=_values(trainer, function, inputs, seed))
    is_users = any(note["kind"] == "method" and note["of"] == SCORING for note in plain)
    if is_users and any(note["plain"] != note["worker"] for note in plain if note["kind"] == "scores"):
        notes.add("probe", of=SCORING, what="first", values=trainer.own_scores(*inputs).tolist())


def _values(trainer: Any, function: Callable[..., Any], inputs: tuple[Any, ...], seed: int) -> list[float | None]:
    import asyncio

    from trl.trainer.utils import is_async_callable

    from async_grpo.setup.setup_file import seed_all

    rows, prompts, completions, completion_ids = inputs
    seed_all(seed)
    given = {name: [row[name] for row in rows] for name in rows[0] if name not in ("prompt", "completion")}
    given |= {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
    logging = dict.fromkeys(("log_extra", "log_metric"), lambda *_: None)
    returned = function(**given, **logging, trainer_state=trainer.state)
    if is_async_callable(function):
        returned = asyncio.run_coroutine_threadsafe(returned, trainer.async_loop).result()
    return [None if value is None else float(value) for value in returned]


if __name__ == "__main__":
    from async_grpo.checks.differential import plain  # not as `__main__`, whose code would count as the user's

    probe.answer(plain.train)
