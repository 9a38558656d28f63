"""Methods of TRL's trainer that a user overrides: where they run, and that none is ignored without a word."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader
from trl import GRPOTrainer

from async_grpo.errors import UnsupportedError
from async_grpo.setup import overrides
from async_grpo.setup.overrides import check_overrides, overridden
from async_grpo.training.prompts import prompt_rows
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun
from kit.own_code import Backwards, ReadsOldLogProbabilities, Shortened
from kit.tiny_trainer import build_trainer

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("changes", [{}, {"num_iterations": 2, "max_steps": 8}], ids=["once", "two iterations"])
def test_a_dataloader_of_the_users_decides_the_prompts(changes: dict[str, Any], tmp_path: Path) -> None:
    run, _ = run_as_trl_would(settings(tmp_path, trainer_class=Backwards, **{"max_steps": 4, **changes}))
    prompts = [group.job.row["prompt"] for group in run.groups]
    assert prompts[:4] == ["1+1", "zz", "y", "wx"]
    assert prompts[12:16] == prompts[:4], "a second epoch"


class Counted(GRPOTrainer):
    """Looks at what TRL's dataloader has, which shuffles with a generator of its own."""

    made = 0

    def get_train_dataloader(self) -> Any:
        self.made += 1
        return super().get_train_dataloader()


def test_a_dataloader_of_the_users_is_made_once_and_read_in_trls_order(tmp_path: Path) -> None:
    """In its second epoch, too: the order of the prompts is drawn by an iteration of its own."""
    run, plain = run_as_trl_would(settings(tmp_path, trainer_class=Counted, max_steps=6))
    assert run.trainer.made == plain.made == 1
    prompts = [group.job.row["prompt"] for group in run.groups]
    assert len(prompts) == 24 and prompts[:12] != prompts[12:]


class Unrepeated(GRPOTrainer):
    def get_train_dataloader(self) -> Any:
        return DataLoader(list(self.train_dataset), batch_size=8, collate_fn=list)


def test_a_dataloader_without_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"training dataloader does not repeat each row num_generations=2"):
        next(prompt_rows(build_trainer(tmp_path, trainer_class=Unrepeated)))


def test_a_single_turn_of_the_users_is_what_is_trained_on(tmp_path: Path) -> None:
    """Eight tokens are sampled, and the model never ends by itself."""
    run, plain = run_as_trl_would(settings(tmp_path, trainer_class=Shortened, max_completion_length=8))
    lengths = {int(length) for group in run.groups for length in group.completion_lengths}
    assert max(lengths) == 7
    assert type(plain) is Shortened


class SamplesAgain(GRPOTrainer):
    """Samples until rewards differ, inside of one call."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        super()._generate_and_score_completions(inputs)
        return super()._generate_and_score_completions(inputs)


def test_a_trainer_that_samples_twice_for_one_batch_is_refused(tmp_path: Path) -> None:
    """It would get the same completions again, for ever if it waits for better ones."""
    with pytest.raises(UnsupportedError, match=r"SamplesAgain makes completions twice.*_prepare_inputs"):
        InProcessRun(settings(tmp_path, trainer_class=SamplesAgain)).train()


def test_old_log_probabilities_are_there_for_who_reads_them(tmp_path: Path) -> None:
    """`bypass` has no use for them, and spares TRL their forward pass where nobody else has."""
    run_as_trl_would(settings(tmp_path, trainer_class=ReadsOldLogProbabilities, num_iterations=2))


class Naming(GRPOTrainer):
    def _log_metric(self, name: str, value: float) -> None:
        super()._log_metric(f"mine/{name}", value)


def counting(completions: list[Any], log_metric: Any, **_: Any) -> list[float]:
    log_metric("rows", len(completions))
    return [float(len(completion)) for completion in completions]


def test_an_override_of_the_logging_of_rewards_runs_once(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, trainer_class=Naming, reward_funcs=counting, max_steps=1)).train()
    assert [name for name in run.logs[0] if name.endswith("rows")] == ["mine/rows"]


def test_the_users_methods_are_found_and_others_are_not(tmp_path: Path) -> None:
    class Deeper(Shortened):
        own = 1

        def helper(self) -> None: ...

        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)

    assert overridden(build_trainer(tmp_path, trainer_class=Deeper)) == ["_generate_single_turn", "log"]
    assert overridden(build_trainer(tmp_path)) == []


def test_an_override_of_a_method_that_is_not_known_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build_trainer(tmp_path, trainer_class=Shortened)
    check_overrides(trainer)
    monkeypatch.delitem(overrides.HONOURED, "_generate_single_turn")
    with pytest.raises(UnsupportedError, match=r"Shortened overrides _generate_single_turn.*without --distributed"):
        check_overrides(trainer)


@pytest.mark.parametrize(
    "name",
    [
        *("_generate", "_generate_single_turn", "_tool_call_loop", "_get_tool_suffix_ids"),
        *("_calculate_rewards", "_generate_and_score_completions"),
    ],
)
def test_a_method_that_is_assigned_to_the_trainer_is_refused(name: str, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path)
    setattr(trainer, name, getattr(trainer, name))
    with pytest.raises(UnsupportedError, match=rf"{name} was assigned to the trainer object.*subclass"):
        check_overrides(trainer)


def test_a_dataloader_of_the_users_excludes_several_ranks(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, trainer_class=Backwards)
    trainer.args = SimpleNamespace(world_size=2)
    with pytest.raises(UnsupportedError, match=r"get_train_dataloader.*_get_train_sampler instead"):
        check_overrides(trainer)
