"""Methods of TRL's trainer that a user overrides, patches or assigns: none is ignored without a word.

What becomes of those that are honoured is compared with plain TRL in `differential_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import trl
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import GRPOTrainer

from async_grpo.api.trainer import setup_of
from async_grpo.errors import SetupFileError, UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.setup import overrides
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.overrides import check_overrides, describe_overrides, overridden
from async_grpo.setup.replaced import original, patched_here, users_class
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.prompts import prompt_rows
from kit.in_process import InProcessRun
from kit.own_code import Backwards, Shortened
from kit.tiny_trainer import build_trainer


def patch(monkeypatch: pytest.MonkeyPatch, name: str, around: Any, cls: Any = GRPOTrainer) -> list[str]:
    """Put `around(method, trainer, *args)` into the class; returns a list that gets an entry for each call."""
    method, calls = getattr(cls, name), []

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return around(method, self, *args, **kwargs)

    monkeypatch.setattr(cls, name, patched)
    return calls


def unchanged(method: Any, *args: Any, **kwargs: Any) -> Any:
    return method(*args, **kwargs)


# --- What is found ---


def test_the_users_methods_are_found_and_others_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deeper(Shortened):
        own = 1

        def helper(self) -> None: ...

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    assert overridden(build_trainer(tmp_path, trainer_class=Deeper)) == ["_generate_single_turn", "log"]
    trainer = build_trainer(tmp_path)
    assert overridden(trainer) == []
    patch(monkeypatch, "training_step", unchanged, Trainer)  # TRL overrides it, and calls it
    check_overrides(trainer)
    assert describe_overrides(trainer) == "training_step (trains, in the server)"


def test_a_patch_of_generate_changes_what_is_rewarded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(method: Any, self: Any, prompts: Any) -> Any:
        prompt_ids, ids, mask, completions, logprobs, *rest = method(self, prompts)
        cut = [row[:-1] for row in ids], mask, [text[:-1] for text in completions], [row[:-1] for row in logprobs]
        return (prompt_ids, *cut, *rest)

    calls = patch(monkeypatch, "_generate", shortened)
    run = InProcessRun(lambda: build_trainer(tmp_path, max_steps=1)).train()
    assert {int(length) for group in run.groups for length in group.completion_lengths} == {7}
    assert len(calls) == 1, "not in the server, where TRL's own runs"
    assert original(GRPOTrainer, "_generate") is not GRPOTrainer._generate


def test_a_patch_of_the_prompts_makes_the_prompts_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(method: Any, self: Any, prompts: Any) -> Any:
        return method(self, [f"{prompt}!" for prompt in prompts])

    patch(monkeypatch, "_tokenize_prompts", louder)
    run = InProcessRun(lambda: build_trainer(tmp_path, max_steps=1)).train()
    decode = run.worker.processing_class.decode
    assert [decode(group.prompt_ids) for group in run.groups] == [f"{group.job.row['prompt']}!" for group in run.groups]


def test_a_class_put_in_the_place_of_trls_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(GRPOTrainer):
        def _generate(self, prompts: Any) -> Any:
            return super()._generate(prompts)

    monkeypatch.setattr(trl, "GRPOTrainer", Mine)
    trainer = build_trainer(tmp_path, trainer_class=Mine)
    assert overridden(trainer) == ["_generate"]
    assert RolloutTrainer(trainer).generates_itself


class LooksAtCompletions(Algorithm, GRPOTrainer):
    """It declares itself, so what it overrides leaves the making of completions to TRL."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs)


class OfAUser(LooksAtCompletions):
    def _generate(self, prompts: Any) -> Any:
        return super()._generate(prompts)


def test_what_a_declared_algorithm_overrides_is_not_of_the_user(tmp_path: Path) -> None:
    declared, users = (build_trainer(tmp_path, trainer_class=cls) for cls in (LooksAtCompletions, OfAUser))
    assert overridden(declared) == ["_generate_and_score_completions"] and not describe_overrides(declared)
    assert describe_overrides(users) == "_generate (makes completions, in the workers)"
    assert RolloutTrainer(declared).samples_whole
    assert RolloutTrainer(users).generates_itself


def test_a_class_is_the_users_wherever_it_is_written(tmp_path: Path) -> None:
    """Ours, between which and TRL it is put, are known by their declaration, and not by the name of their module."""
    namespace: dict[str, Any] = {"__name__": "async_grpo.training.later", "GRPOTrainer": GRPOTrainer}
    exec(
        "class Later(GRPOTrainer):\n    def _calculate_rewards(self, *it): return 2 * super()._calculate_rewards(*it)",
        namespace,
    )
    run = InProcessRun(lambda: build_trainer(tmp_path, trainer_class=namespace["Later"], max_steps=1)).train()
    assert overridden(run.trainer) == ["_calculate_rewards"]
    assert users_class(run.trainer) == "Later" and type(run.trainer).__name__ == "AsyncLater"


def test_a_patch_of_a_process_that_sends_its_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a run get the function of a notebook, not what its cells have patched."""

    def made_in_a_cell() -> None: ...

    assert patched_here() == []
    assert setup_of(made_in_a_cell).payload is not None
    patch(monkeypatch, "_calculate_rewards", unchanged)
    with pytest.raises(SetupFileError, match=r"^_calculate_rewards .* patched in this process.*of made_in_a_cell"):
        setup_of(made_in_a_cell)


def test_a_patch_that_calls_trls_loss_is_not_a_loss_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path)
    trls = GRPOTrainer._compute_loss
    patch(monkeypatch, "_compute_loss", unchanged)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, *args: 2 * trls(self, *args))
    assert overridden(trainer) == ["_compute_loss"] and not has_own_loss(trainer)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", wraps(trls)(lambda self, *args: 2 * trls(self, *args)))
    assert overridden(trainer) == ["_compute_loss"] and not has_own_loss(trainer)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].sum())
    assert has_own_loss(trainer)


# --- What is refused ---


class Unrepeated(GRPOTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(list(self.train_dataset), batch_size=8, collate_fn=list)


class SamplesAgain(GRPOTrainer):
    """Samples until rewards differ, inside of one call. It would get the same completions again, for ever."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


def test_what_makes_no_groups_of_trls_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"training dataloader does not repeat each row num_generations=2"):
        next(prompt_rows(build_trainer(tmp_path, trainer_class=Unrepeated)))
    with pytest.raises(UnsupportedError, match=r"SamplesAgain makes completions twice.*_prepare_inputs"):
        InProcessRun(lambda: build_trainer(tmp_path, trainer_class=SamplesAgain)).train()


def assigns(name: str) -> Callable[[Any, Any], None]:
    return lambda trainer, monkeypatch: setattr(trainer, name, getattr(trainer, name, list))


def no_longer_known(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(overrides.HONOURED, "_generate_single_turn")


def patched_and_not_known(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(monkeypatch, "floating_point_ops", unchanged, cls=Trainer)
    check_overrides(trainer)
    monkeypatch.delitem(overrides.HONOURED, "floating_point_ops")


def two_ranks(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(trainer.args), "world_size", 2)


def collates_on_two_ranks(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.data_collator = list
    check_overrides(trainer)
    two_ranks(trainer, monkeypatch)


MAKING = (
    *("_generate", "_generate_single_turn", "_tool_call_loop", "_get_tool_suffix_ids"),
    *("_calculate_rewards", "_generate_and_score_completions"),
)
REFUSED: list[tuple[type[GRPOTrainer], Callable[[Any, Any], Any], str]] = [
    *((GRPOTrainer, assigns(name), rf"{name} was assigned to the trainer object.*subclass") for name in MAKING),
    (Shortened, no_longer_known, r"Shortened overrides _generate_single_turn.*without --distributed"),
    (GRPOTrainer, patched_and_not_known, r"floating_point_ops was patched in.*without --distributed"),
    (
        GRPOTrainer,  # what it calls is TRL's method, which samples with the worker's model in place of its engine
        lambda trainer, monkeypatch: patch(monkeypatch, "_generate_single_turn", unchanged),
        r"_generate_single_turn was patched in GRPOTrainer.*in a subclass",
    ),
    (Backwards, two_ranks, r"get_train_dataloader.*_get_train_sampler instead"),
    (GRPOTrainer, collates_on_two_ranks, r"data_collator was assigned to the trainer.*_get_train_sampler"),
]


@pytest.mark.parametrize(("trainer_class", "change", "says"), REFUSED)
def test_what_would_be_ignored_is_refused(
    trainer_class: type[GRPOTrainer], change: Any, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tmp_path, trainer_class=trainer_class)
    check_overrides(trainer)
    change(trainer, monkeypatch)
    with pytest.raises(UnsupportedError, match=says):
        check_overrides(trainer)
