"""A run that is resumed with something else than it was begun with: it has that, or is refused, or it is said."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from transformers import TrainerState
from trl import GRPOTrainer

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.credit import PPOConfig
from async_grpo.errors import RunDirError
from async_grpo.roles.parameter_server import training_of
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir, RunState
from async_grpo.settings import TrainingSettings
from async_grpo.setup.process import StopRequest
from async_grpo.training import resumed_settings
from async_grpo.training.checkpoints import CheckpointFolder, resume
from async_grpo.training.corrections.rule import rule
from async_grpo.training.hyperparameters import configuration
from async_grpo.training.resumed_settings import APPLIED, KEPT, OF_THE_BATCH, REFUSED, check_settings
from async_grpo.training.trl_trainer import TrainingEvents, make_async
from kit.plans import planned
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, plain_rows


@pytest.fixture
def begun(tmp_path: Path) -> RunState:
    """A run in `worker` that has a checkpoint in `outputs`."""
    run = RunDir(tmp_path / "worker")
    state = prepare(run.root, planned(Path("my_trainer.py")))
    folder = CheckpointFolder(build_trainer(tmp_path / "outputs"), run, state)
    checkpoint_folders.start_saving(folder.staging)
    written = folder.staging / "checkpoint-4"
    written.mkdir()
    used = RolloutState(run_id=state.run_id, step=4, next_seq=16, rounds=4, unusable=[], consumed_below=16, consumed=[])
    folder.put(written, used, batch=None)
    return run.update_state(**folder.record)


def test_the_same_is_resumed(tmp_path: Path, begun: RunState, warnings: list[str]) -> None:
    found = resume(build_trainer(tmp_path / "outputs"), RunDir(tmp_path / "worker"), begun)
    assert found is not None and found.path == tmp_path / "outputs" / "checkpoint-4"
    assert warnings == []
    assert (begun.step, begun.output_dir) == (4, str(tmp_path / "outputs"))


def test_another_model_is_refused_in_one_sentence(tmp_path: Path, begun: RunState) -> None:
    larger = build_trainer(tmp_path / "outputs", model=build_model(build_tokenizer(), num_hidden_layers=3))
    with pytest.raises(RunDirError, match=r"checkpoint-4 is of another model than the setup file builds now: \d+ tens"):
        resume(larger, RunDir(tmp_path / "worker"), begun)
    earlier = replace(begun, model="", data="")  # a run of an earlier version did not note it
    assert resume(larger, RunDir(tmp_path / "worker"), earlier) is not None


def test_data_in_another_order_are_said(tmp_path: Path, begun: RunState, warnings: list[str]) -> None:
    trainer = build_trainer(tmp_path / "outputs", train_dataset=Dataset.from_list(plain_rows().to_list()[::-1]))
    assert resume(trainer, RunDir(tmp_path / "worker"), begun) is not None
    assert len(warnings) == 1 and "not what they were, or not in the same order: 14 rows" in warnings[0]


@pytest.mark.parametrize("stops", [False, True])
def test_what_is_undecided_may_stop_a_resumed_run(stops: bool, tmp_path: Path, begun: RunState) -> None:
    run, trainer = RunDir(tmp_path / "worker"), build_trainer(tmp_path / "outputs")
    write_json(run.summary, {"undecided_tokens": 64} if stops else {})
    with training_of(trainer, run, begun, TrainingSettings(resume=True), StopRequest()) as training:
        guard = cast(Any, trainer).correct.fresh
        assert guard.bound.stops == stops
        guard.on_pre_optimizer_step(None, trainer.state)
        assert training.figures == {"undecided_tokens": 0, "undecided_nats": 0.0}


def test_a_setting_that_the_checkpoint_keeps_is_refused_by_the_runs_record(tmp_path: Path, begun: RunState) -> None:
    run, trainer = RunDir(tmp_path / "worker"), build_trainer(tmp_path / "outputs")
    write_json(run.hyperparameters, {"trainer": configuration(trainer)})
    assert resume(trainer, run, begun) is not None
    write_json(run.hyperparameters, {"trainer": {**configuration(trainer), "optim": "sgd"}})
    with pytest.raises(RunDirError, match=r"^optim is \w+, and was sgd: "):
        resume(trainer, run, begun)


# --- Settings that a checkpoint brings back ----------------------------------------------------------------------


STEPS_DONE = 4
BEGUN: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "max_steps": 20,
    "weight_decay": 0.01,
    "save_steps": 10,
    "eval_steps": 10,
    "logging_steps": 5,
}
OTHER: dict[str, Any] = {
    "learning_rate": 2e-4,
    "weight_decay": 0.3,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "adam_epsilon": 1e-4,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.5},
    "warmup_steps": 8,
    "max_steps": 40,
    "num_train_epochs": 9.0,
    "logging_steps": 2,
    "save_steps": 3,
    "eval_steps": 4,
    "optim": "sgd",
    "optim_args": "amsgrad=True",
    "optim_target_modules": ["q_proj"],
    "fp16": True,
    "metric_for_best_model": "reward",
    "greater_is_better": False,
    "num_generations": 4,
    "data_seed": 7,
    "ignore_data_skip": True,
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 2,
    "generation_batch_size": 16,
    "num_iterations": 2,
    "beta": 0.5,
    "critic_model": "another",
    "gamma": 0.5,
    "lam": 0.5,
    "kl_in_reward": True,
    "kl_penalty": "abs",
}
BEFORE = {"metric_for_best_model": "loss", "greater_is_better": True}
OF_THE_OPTIMIZER = [name for name, where in APPLIED.items() if where != "trainer's state"]


def test_each_field_of_the_tables_is_one_of_a_configuration_and_is_tried() -> None:
    fields = {*APPLIED, *REFUSED, *KEPT, *OF_THE_BATCH}
    assert fields == OTHER.keys()
    assert fields <= PPOConfig.__dataclass_fields__.keys()


def with_optimizer(folder: Path, **settings: Any) -> GRPOTrainer:
    if "num_train_epochs" in settings:  # it decides where max_steps does not
        settings["max_steps"] = int(settings["num_train_epochs"] * 5)
    trainer = build_trainer(folder, **{**BEGUN, **settings})
    make_async(trainer, TrainingEvents(), correction=rule("none"), settings=TrainingSettings())
    trainer.create_optimizer_and_scheduler(trainer.args.max_steps)
    return trainer


def stepped(trainer: GRPOTrainer) -> GRPOTrainer:
    for _ in range(STEPS_DONE):
        for parameter in trainer.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    trainer.state.global_step = STEPS_DONE
    return trainer


def saved(trainer: GRPOTrainer, folder: Path) -> Path:
    folder.mkdir()
    torch.save(trainer.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(trainer.lr_scheduler.state_dict(), folder / "scheduler.pt")
    return folder


def groups_of(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    return [{name: group[name] for name in group if name != "params"} for group in trainer.optimizer.param_groups]


@pytest.mark.parametrize("field", OF_THE_OPTIMIZER)
def test_an_applied_field_is_in_force_as_if_the_run_had_begun_with_it(tmp_path: Path, field: str) -> None:
    other = {field: OTHER[field]}
    if field == "lr_scheduler_kwargs":
        other["lr_scheduler_type"] = "cosine_with_min_lr"
    checkpoint = saved(stepped(with_optimizer(tmp_path / "a")), tmp_path / "checkpoint-4")
    resumed = with_optimizer(tmp_path / "b", **other)
    resumed._load_optimizer_and_scheduler(str(checkpoint))
    wanted = stepped(with_optimizer(tmp_path / "c", **other))
    assert groups_of(resumed) == groups_of(wanted)
    assert resumed.lr_scheduler.get_last_lr() == wanted.lr_scheduler.get_last_lr()
    for trainer in (resumed, wanted):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert groups_of(resumed) == groups_of(wanted)


def test_the_same_settings_leave_optimizer_and_schedule_as_they_were(tmp_path: Path, messages: list[str]) -> None:
    begun = stepped(with_optimizer(tmp_path / "a"))
    resumed = with_optimizer(tmp_path / "b")
    resumed._load_optimizer_and_scheduler(str(saved(begun, tmp_path / "checkpoint-4")))
    assert groups_of(resumed) == groups_of(begun)
    assert resumed.lr_scheduler.state_dict() == begun.lr_scheduler.state_dict()
    assert messages == []


def test_a_stretched_schedule_is_said_with_both_rates(tmp_path: Path, messages: list[str]) -> None:
    checkpoint = saved(stepped(with_optimizer(tmp_path / "a", warmup_steps=0)), tmp_path / "checkpoint-4")
    resumed = with_optimizer(tmp_path / "b", warmup_steps=0, max_steps=40)
    resumed.state.global_step = STEPS_DONE
    resumed._load_optimizer_and_scheduler(str(checkpoint))
    assert len(messages) == 1
    assert "the learning rate of step 5 is 0.0009, and would be 0.0008 with the checkpoint's settings" in messages[0]


def test_without_an_optimizer_the_schedule_is_said_to_begin_again(tmp_path: Path, warnings: list[str]) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    with_optimizer(tmp_path / "a")._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-4"))
    assert len(warnings) == 1 and "save_only_model" in warnings[0]


def of_a_checkpoint(saved: tuple[Any, Any], made: tuple[Any, Any]) -> tuple[Any, Any]:
    """An optimizer and a schedule that were made again, with the saved state of others."""
    in_force = resumed_settings.InForce.of(*made)
    for new, old in zip(made, saved, strict=True):
        new.load_state_dict(deepcopy(old.state_dict()))
    in_force.put_back(*made, STEPS_DONE)
    return made


def test_another_schedule_s_own_state_is_said_to_be_kept(warnings: list[str]) -> None:
    def own(rate: float) -> tuple[Any, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=rate)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 5)

    optimizer, schedule = of_a_checkpoint(own(0.1), own(0.2))
    assert schedule.base_lrs == [0.1] and optimizer.param_groups[0]["lr"] == 0.1
    assert warnings == ["the schedule keeps the checkpoint's base rates [0.1], not [0.2]"]


def test_a_schedule_that_turns_the_momentum_continues_where_it_was(warnings: list[str]) -> None:
    def own() -> tuple[Any, Any]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    optimizer, schedule = own()
    for _ in range(STEPS_DONE):
        optimizer.step()
        schedule.step()
    resumed, _ = of_a_checkpoint((optimizer, schedule), own())
    assert resumed.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert warnings == []


@pytest.mark.parametrize("field", [name for name in APPLIED if name not in OF_THE_OPTIMIZER])
def test_an_interval_is_that_of_this_start(tmp_path: Path, field: str) -> None:
    state = TrainerState(max_steps=20)
    state.compute_steps(build_trainer(tmp_path / "a", **BEGUN).args, 20)
    resumed = with_optimizer(tmp_path / "b", **{field: OTHER[field]})
    resumed.callback_handler.on_train_begin(resumed.args, state, resumed.control)
    assert getattr(state, field) == OTHER[field]


def checked(tmp_path: Path, field: str, *, in_batch: bool = False, **begun: Any) -> None:
    trainer = build_trainer(tmp_path)
    before = {**configuration(trainer), **begun, **{name: BEFORE[name] for name in BEFORE if name == field}}
    now = {**before, field: OTHER[field]}
    check_settings(trainer, json.loads(json.dumps(before)), now, tmp_path / "checkpoint-4", in_batch=in_batch)


@pytest.mark.parametrize("field", REFUSED)
def test_a_refused_field_is_named_with_both_values_and_the_way_out(tmp_path: Path, field: str) -> None:
    with pytest.raises(RunDirError, match=rf"^{field} is .*, and was .*: .*Set it as it was, or .*--run-dir OTHER"):
        checked(tmp_path, field)


@pytest.mark.parametrize("field", OF_THE_BATCH)
def test_in_the_middle_of_a_batch_its_fields_stay(tmp_path: Path, field: str) -> None:
    checked(tmp_path, field)
    with pytest.raises(RunDirError, match=f"^{field} is .* in the middle of a generation batch"):
        checked(tmp_path, field, in_batch=True)


@pytest.mark.parametrize("field", ["learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs"])
def test_a_schedule_with_a_state_of_its_own_keeps_its_settings(tmp_path: Path, field: str) -> None:
    checked(tmp_path, field)
    with pytest.raises(RunDirError, match=f"^{field} is .* schedule reduce_lr_on_plateau in the checkpoint holds it"):
        checked(tmp_path, field, lr_scheduler_type="reduce_lr_on_plateau")


@pytest.mark.parametrize("field", [name for name, where in APPLIED.items() if where in ("optimizer", "schedule")])
def test_deepspeed_brings_its_own_back(tmp_path: Path, field: str) -> None:
    trainer = build_trainer(tmp_path)
    trainer.is_deepspeed_enabled = True
    before = configuration(trainer)
    with pytest.raises(RunDirError, match=f"^{field} is .* DeepSpeed brings it back with the checkpoint"):
        check_settings(trainer, before, {**before, field: OTHER[field]}, tmp_path, in_batch=False)


@pytest.mark.parametrize("field", KEPT)
def test_a_kept_field_is_said(tmp_path: Path, field: str, warnings: list[str]) -> None:
    checked(tmp_path, field)
    assert warnings == [f"{field}={OTHER[field]} changes nothing in a resumed run: {KEPT[field]}"]


def test_a_setting_that_no_checkpoint_holds_is_not_looked_at(tmp_path: Path, warnings: list[str]) -> None:
    trainer = build_trainer(tmp_path)
    before = configuration(trainer)
    now = {**before, "max_grad_norm": 0.1, "temperature": 0.5, "metric_for_best_model": "reward"}
    check_settings(trainer, before, now, tmp_path, in_batch=False)
    assert warnings == []
