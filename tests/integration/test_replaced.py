"""Methods of TRL's that were patched on a class or assigned to the trainer: each is honoured, or refused by name."""

from __future__ import annotations

from functools import wraps
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import trl
from torch.utils.data import DataLoader
from transformers import Trainer
from trl import GRPOTrainer

from async_grpo.api.functions import setup_of
from async_grpo.errors import SetupFileError, UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.setup import overrides
from async_grpo.setup.algorithm import Algorithm
from async_grpo.setup.overrides import check_overrides, describe_overrides, overridden
from async_grpo.setup.replaced import original, patched_here, users_class
from async_grpo.training.corrections.trl_loss import has_own_loss
from async_grpo.training.prompts import prompt_rows
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun
from kit.tiny_trainer import PROMPTS, build_trainer

pytestmark = pytest.mark.integration


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


def doubled(method: Any, *args: Any, **kwargs: Any) -> Any:
    return 2 * method(*args, **kwargs)


# --- What samples and scores ---


def test_a_patch_of_the_scoring_scores_in_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = InProcessRun(settings(tmp_path, max_steps=1)).train()
    patch(monkeypatch, "_calculate_rewards", doubled)
    run, plain = run_as_trl_would(settings(tmp_path, max_steps=1))
    assert [group.rewards.tolist() for group in run.groups] == [(2 * it.rewards).tolist() for it in once.groups]
    assert overridden(plain) == ["_calculate_rewards"]


def test_a_patch_of_the_assembly_runs_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(method: Any, self: Any, inputs: Any) -> Any:
        output = method(self, inputs)
        return {**output, "advantages": output["advantages"] / 2}

    calls = patch(monkeypatch, "_generate_and_score_completions", halved)
    run_as_trl_would(settings(tmp_path))
    assert len(calls) == 2 * 2 + 2, "a batch in the server, its groups together in the worker, and plain TRL"


def test_a_patch_of_generate_changes_what_is_rewarded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shortened(method: Any, self: Any, prompts: Any) -> Any:
        prompt_ids, ids, mask, completions, logprobs, *rest = method(self, prompts)
        cut = [row[:-1] for row in ids], mask, [text[:-1] for text in completions], [row[:-1] for row in logprobs]
        return (prompt_ids, *cut, *rest)

    calls = patch(monkeypatch, "_generate", shortened)
    run = InProcessRun(settings(tmp_path, max_steps=1)).train()
    assert {int(length) for group in run.groups for length in group.completion_lengths} == {7}
    assert len(calls) == 1, "not in the server, where TRL's own runs"
    assert original(GRPOTrainer, "_generate") is not GRPOTrainer._generate


def test_a_patch_of_the_prompts_makes_the_prompts_of_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def louder(method: Any, self: Any, prompts: Any) -> Any:
        return method(self, [f"{prompt}!" for prompt in prompts])

    patch(monkeypatch, "_tokenize_prompts", louder)
    run = InProcessRun(settings(tmp_path, max_steps=1)).train()
    decode = run.worker.processing_class.decode
    assert [decode(group.prompt_ids) for group in run.groups] == [f"{group.job.row['prompt']}!" for group in run.groups]


def test_a_method_of_a_mixin_is_an_override(tmp_path: Path) -> None:
    class Doubling:
        def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    class Mine(Doubling, GRPOTrainer): ...

    _, plain = run_as_trl_would(settings(tmp_path, trainer_class=Mine, max_steps=1))
    assert overridden(plain) == ["_calculate_rewards"]


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
    with pytest.raises(
        SetupFileError, match=r"^_calculate_rewards .* patched in this process.*inside of made_in_a_cell"
    ):
        setup_of(made_in_a_cell)


def test_a_patch_of_a_single_turn_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it calls is TRL's method, which samples with the worker's model in place of its engine."""
    patch(monkeypatch, "_generate_single_turn", unchanged)
    with pytest.raises(UnsupportedError, match=r"_generate_single_turn was patched in GRPOTrainer.*in a subclass"):
        check_overrides(build_trainer(tmp_path))


def test_a_patch_of_a_method_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path)
    patch(monkeypatch, "floating_point_ops", unchanged, cls=Trainer)
    check_overrides(trainer)
    monkeypatch.delitem(overrides.HONOURED, "floating_point_ops")
    with pytest.raises(UnsupportedError, match=r"floating_point_ops was patched in.*without --distributed"):
        check_overrides(trainer)


# --- What decides the prompts ---


def backwards(trainer: Any) -> Any:
    def sampler(dataset: Any = None) -> list[int]:
        return [index for index in reversed(range(len(dataset))) for _ in range(trainer.num_generations)]

    return sampler


def test_a_sampler_that_is_assigned_decides_the_prompts(tmp_path: Path) -> None:
    trainer: Any = build_trainer(tmp_path)
    trainer._get_train_sampler = backwards(trainer)
    check_overrides(trainer)
    assert [row["prompt"] for row in islice(prompt_rows(trainer), 3)] == PROMPTS[:-4:-1]


def test_a_dataloader_that_is_assigned_decides_the_prompts(tmp_path: Path) -> None:
    made: list[Any] = []

    def get_trainer(**changes: Any) -> GRPOTrainer:
        trainer: Any = settings(tmp_path, max_steps=3)(**changes)

        def loader() -> Any:
            made.append(trainer)
            rows = [trainer.train_dataset[index] for index in backwards(trainer)(trainer.train_dataset)]
            return DataLoader(rows, batch_size=8, collate_fn=list)

        trainer.get_train_dataloader = loader
        return trainer

    run, plain = run_as_trl_would(get_trainer)
    assert [group.job.row["prompt"] for group in run.groups][:4] == ["1+1", "zz", "y", "wx"]
    assert made == [run.trainer, plain], "once in each"


def test_a_data_collator_of_the_users_changes_the_rows(tmp_path: Path) -> None:
    def louder(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**row, "prompt": f"{row['prompt']}!"} for row in rows]

    def get_trainer(**changes: Any) -> GRPOTrainer:
        trainer = settings(tmp_path, max_steps=4)(**changes)
        trainer.data_collator = louder
        return trainer

    run, _ = run_as_trl_would(get_trainer)
    assert {group.job.row["prompt"] for group in run.groups} <= {f"{prompt}!" for prompt in PROMPTS}


def test_a_data_collator_excludes_several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path)
    trainer.data_collator = list
    check_overrides(trainer)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(UnsupportedError, match=r"data_collator was assigned to the trainer.*_get_train_sampler"):
        check_overrides(trainer)


# --- What trains, logs and saves ---


def test_a_patch_of_transformers_training_step_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though TRL overrides the method and calls it."""
    calls = patch(monkeypatch, "training_step", unchanged, cls=Trainer)
    _, plain = run_as_trl_would(settings(tmp_path))
    assert len(calls) == 4
    check_overrides(plain)
    assert describe_overrides(plain) == "training_step (trains, in the server)"


@pytest.mark.parametrize("name", ["_compute_loss", "log", "_get_per_token_logps_and_entropies"])
def test_a_method_that_is_assigned_to_the_trainer_trains_in_the_server(name: str, tmp_path: Path) -> None:
    calls: list[Any] = []

    def get_trainer(**changes: Any) -> GRPOTrainer:
        trainer = settings(tmp_path)(**changes)
        method = getattr(trainer, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(self)
            return method(*args, **kwargs)

        setattr(trainer, name, MethodType(counted, trainer))
        check_overrides(trainer)
        return trainer

    run, plain = run_as_trl_would(get_trainer)
    assert set(calls) == {run.trainer, plain}
    assert calls.count(run.trainer) == calls.count(plain) > 0


def test_a_checkpoint_that_is_saved_by_an_assigned_method_has_its_place(tmp_path: Path) -> None:
    saved: list[int] = []

    def get_trainer() -> GRPOTrainer:
        trainer: Any = build_trainer(tmp_path, save_strategy="steps", save_steps=1)
        save = trainer._save_checkpoint

        def counted(*args: Any, **kwargs: Any) -> None:
            saved.append(trainer.state.global_step)
            save(*args, **kwargs)

        trainer._save_checkpoint = counted
        return trainer

    run = InProcessRun(get_trainer).train()
    assert saved == [1, 2] and run.checkpoints == ["checkpoint-1", "checkpoint-2"]


def test_a_patch_of_the_loss_that_calls_trls_is_not_a_loss_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tmp_path)
    trls = GRPOTrainer._compute_loss
    patch(monkeypatch, "_compute_loss", unchanged)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, *args: 2 * trls(self, *args))
    assert overridden(trainer) == ["_compute_loss"] and not has_own_loss(trainer)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", wraps(trls)(lambda self, *args: 2 * trls(self, *args)))
    assert overridden(trainer) == ["_compute_loss"] and not has_own_loss(trainer)
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda self, model, inputs: inputs["advantages"].sum())
    assert has_own_loss(trainer)
