"""What TRL does around the training step, and when: callbacks, evaluation, checkpoints; where metrics go."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, PrinterCallback, ProgressCallback, Trainer, TrainerCallback
from transformers.integrations import integration_utils
from trl import GRPOTrainer

from async_grpo.archive import checkpoint_folders
from async_grpo.archive.rollout_state import RolloutState
from async_grpo.errors import UnsupportedError
from async_grpo.setup.overrides import check_callbacks
from async_grpo.setup.setup_file import _failed
from async_grpo.telemetry.run_log import RunLog
from async_grpo.training.corrections.checks import describe_noise
from async_grpo.training.reporting import CurvesCallback, report
from async_grpo.training.rollout_source import StopTraining
from async_grpo.training.trl_trainer import fit, refuse_unsupported
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.runs import lines_of
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, plain_rows


class Noting(TrainerCallback):
    def __init__(self) -> None:
        self.heard: list[str] = []
        for name in ("train_begin", "step_end", "log", "train_end"):
            setattr(self, f"on_{name}", lambda *_, name=name, **__: self.heard.append(name))


def test_callbacks_run_in_the_trainer_only(tmp_path: Path) -> None:
    made: list[Noting] = []

    def get_trainer() -> GRPOTrainer:
        made.append(Noting())
        return build_trainer(tmp_path, arguments={"callbacks": [made[-1]]})

    InProcessRun(get_trainer).train()
    assert [it.heard for it in made] == [["train_begin", "step_end", "log", "step_end", "log", "log", "train_end"], []]


@pytest.mark.parametrize("when", ["step_end", "log", "epoch_end"])
def test_where_a_callback_ends_the_training_its_weights_are_saved(when: str, tmp_path: Path) -> None:
    callback = TrainerCallback()
    setattr(callback, f"on_{when}", lambda args, state, control, **_: setattr(control, "should_training_stop", True))
    changes: dict[str, Any] = {"arguments": {"callbacks": [callback]}, "save_strategy": "no", "max_steps": 9}
    run = InProcessRun(lambda: build_trainer(tmp_path, **changes)).train()
    assert run.checkpoints == [f"checkpoint-{run.trainer.state.global_step}"] and run.trainer.state.global_step < 9


def test_data_without_prompts_are_refused(tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path, train_dataset=plain_rows().rename_column("prompt", "question"))
    with pytest.raises(UnsupportedError, match=r"no column `prompt`.* it has: question"):
        refuse_unsupported(trainer)


class OwnProgress(ProgressCallback):
    begun = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_begin(*args, **kwargs)
        self.begun += 1


class OwnPrinter(PrinterCallback): ...


@pytest.mark.parametrize("own", [OwnProgress, OwnPrinter])
def test_a_progress_bar_of_the_users_stays_and_transformers_own_goes(own: type[Any], tmp_path: Path) -> None:
    for silent in (True, False):  # transformers adds its printer, or its bar
        given = own()
        run = InProcessRun(settings(tmp_path, {"callbacks": [given]}, disable_tqdm=silent))
        assert callback(run, (ProgressCallback, PrinterCallback)) == [given]
    if own is OwnProgress:
        run.train()
        assert given.begun == 1


class RewardAndCallback(TrainerCallback):
    __name__ = "both"

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        return [0.0 for _ in completions]

    def reward(self, completions: list[Any], **_: Any) -> list[float]:
        return self(completions)


@pytest.mark.parametrize("method", [False, True], ids=["object", "its method"])
def test_a_reward_that_is_a_callback_as_well_is_refused(method: bool, tmp_path: Path) -> None:
    both = RewardAndCallback()
    rewards = [both.reward if method else both]
    check_callbacks(build_trainer(tmp_path, reward_funcs=rewards, arguments={"callbacks": [RewardAndCallback()]}))
    trainer = build_trainer(tmp_path, reward_funcs=rewards, arguments={"callbacks": [both]})
    with pytest.raises(UnsupportedError, match=r"RewardAndCallback is a callback and a reward.*trainer_state"):
        check_callbacks(trainer)


def test_evaluation_generates_in_the_trainer(tmp_path: Path) -> None:
    each_step = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "per_device_eval_batch_size": 4}
    get_trainer = settings(tmp_path, {"eval_dataset": plain_rows(4)}, **each_step)
    run = InProcessRun(get_trainer).train()
    plain = get_trainer()
    plain.train()
    ours, theirs = ([one for one in it.state.log_history if "eval_reward" in one] for it in (run.trainer, plain))
    assert [entry["step"] for entry in ours] == [0, 1, 2]
    assert [set(entry) for entry in ours] == [set(entry) for entry in theirs]
    assert len(run.batches) == 2, "evaluation must take no group from the workers"
    assert ours[0]["eval_reward"] == pytest.approx(theirs[0]["eval_reward"])  # same weights, same seed
    assert len(run.logs) == 2


def test_checkpoints_are_told_and_rotated(tmp_path: Path) -> None:
    run = InProcessRun(settings(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=1, max_steps=3)).train()
    assert run.checkpoints == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert [folder.name for folder in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert run.trainer.args.save_total_limit == 1


@pytest.mark.parametrize(("rate", "disabled", "told"), [(0.05, False, True), (0.05, True, False), (0.0, False, False)])
def test_dropout_that_workers_do_not_have_is_told(rate: float, disabled: bool, told: bool, tmp_path: Path) -> None:
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=rate)
    trainer = build_trainer(tmp_path, arguments={"peft_config": adapter}, disable_dropout=disabled)
    assert ("dropout (0.05)" in describe_noise(trainer)) is told


def test_noise_in_embeddings_that_workers_do_not_have_is_told(tmp_path: Path) -> None:
    said = describe_noise(build_trainer(tmp_path, neftune_noise_alpha=5.0))
    assert "noise in its embeddings (neftune_noise_alpha=5.0) and workers sample without it" in said
    assert "neftune_noise_alpha=None in the GRPOConfig" in said


MADE = build_model(build_tokenizer())


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"beta": 0.1}, "the reference model of beta > 0. Set beta=0"),
        ({"trainer_class": lambda **given: GRPOTrainer(**{**given, "processing_class": None})}, "the tokenizer. Pass"),
        ({"reward_funcs": AutoModelForSequenceClassification.from_config(MADE.config)}, "the tokenizer of a reward"),
    ],
)
def test_what_trl_loads_by_the_name_of_a_model_that_has_none(changes: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(OSError) as failure:
        build_trainer(tmp_path, model=MADE, **changes)
    said = _failed("", failure.value, Path(__file__))
    assert said.startswith("A model that was made in code has no name (") and f"and TRL loads by it {what}" in said


# --- When TRL's trainer calls what happens around its optimizer steps, and where metrics go ----------------------


class NotedRun(InProcessRun):
    """Writes down what it is called for; asked for batch number `stop_at` it stops the training."""

    def __init__(self, *args: Any, stop_at: int = 1000, **options: Any) -> None:
        self.noted: list[str] = []
        self._stop_at = stop_at
        super().__init__(*args, **options)

    def training_begins(self) -> None:
        self.noted.append("begins")

    def take_groups(self, version: int) -> Any:
        if len(self.batches) == self._stop_at:
            raise StopTraining
        self.noted.append(f"take {version}")
        return super().take_groups(version)

    def step_done(self) -> bool:
        self.noted.append(f"step {self.trainer.state.global_step}")
        return self.trainer.state.global_step < 3

    def ends_early(self) -> None:
        self.noted.append("ends early")

    def before_checkpoint(self) -> Path | None:
        self.noted.append("space")

    def checkpoint_written(self, checkpoint: Path) -> None:
        assert (checkpoint / "trainer_state.json").exists()
        self.noted.append(checkpoint.name)


class EvaluatedRun(InProcessRun):
    """Logs an evaluation at the end of each step."""

    def step_done(self) -> bool:
        Trainer.log(self.trainer, {"eval_reward": 0.5})
        return True


def test_a_step_is_logged_at_whose_end_an_evaluation_is_logged(tmp_path: Path) -> None:
    run = EvaluatedRun(lambda: build_trainer(tmp_path, max_steps=3))
    fit(run.trainer, resume_from=None)
    assert [entry["step"] for entry in run.trainer.state.log_history if "loss" in entry] == [1, 2, 3]


def test_the_order_of_events_and_a_step_that_asks_to_end_after_a_checkpoint(tmp_path: Path) -> None:
    run = NotedRun(lambda: build_trainer(tmp_path, max_steps=5, save_strategy="steps", save_steps=2))
    fit(run.trainer, resume_from=None)
    first, second = ["take 0", "step 1"], ["take 1", "step 2", "space", "checkpoint-2"]
    assert run.noted == ["begins", *first, *second, "take 2", "step 3", "space", "checkpoint-3"]


class PublishedWeights(InProcessRun):
    """Keeps a weight when a version would be published, and when the next batch is trained on."""

    def __init__(self, *args: Any) -> None:
        self.published: list[float] = []
        self.trained: list[float] = []
        super().__init__(*args)

    def _weight(self) -> float:
        return float(next(self.trainer.model.parameters()).detach().flatten()[0])

    def training_begins(self) -> None:
        self.published.append(self._weight())

    def take_groups(self, version: int) -> Any:
        self.trained.append(self._weight())
        return super().take_groups(version)

    def step_done(self) -> bool:
        self.published.append(self._weight())
        return True


class Shrinks(TrainerCallback):
    """Changes the weights itself, as a moving average or a bound of their norm does."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)

    on_step_end = on_train_begin


def test_weights_that_a_callback_changes_are_published_as_they_are_trained(tmp_path: Path) -> None:
    run = PublishedWeights(lambda: build_trainer(tmp_path, arguments={"callbacks": [Shrinks()]})).train()
    assert run.published[:2] == run.trained
    assert run.published[2] == run._weight()


def test_a_stop_in_the_middle_of_a_step_saves_the_batch_that_the_last_step_left_unfinished(tmp_path: Path) -> None:
    """Two passes on each batch, three to a step: step 1 ends in the middle of batch 1, step 2 begins with its rest."""
    shape = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 3}
    run = NotedRun(lambda: build_trainer(tmp_path, max_steps=5, **shape), stop_at=2)
    fit(run.trainer, resume_from=None)
    assert run.noted == ["begins", "take 0", "take 0", "step 1", "ends early", "space", "checkpoint-1"]
    unfinished = run.trainer.batch_after_step
    assert unfinished.passes_done == 1
    advantages = [inputs["advantages"] for inputs in unfinished.inputs]
    assert sorted(torch.cat(advantages).tolist()) == sorted(run.inputs[1]["advantages"].tolist())


def test_a_checkpoint_at_the_last_step_is_not_trained_on(tmp_path: Path) -> None:
    """transformers itself would take one step more."""
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    assert fit(NotedRun(lambda: build_trainer(tmp_path, **steps)).trainer, resume_from=None)
    for last in (2, 1):
        again = NotedRun(lambda last=last: build_trainer(tmp_path, **{**steps, "max_steps": last}))
        assert not fit(again.trainer, resume_from=tmp_path / "checkpoint-2")
        assert again.noted == [] and again.trainer.state.global_step == 2


class StagedRun(NotedRun):
    """Its checkpoints are written into another folder first."""

    def before_checkpoint(self) -> Path:
        return Path(self.trainer.args.output_dir) / "saving"

    def checkpoint_written(self, checkpoint: Path) -> None:
        super().checkpoint_written(checkpoint)
        assert checkpoint.parent.name == "saving"
        checkpoint.rename(checkpoint.parents[1] / checkpoint.name)


def test_a_checkpoint_that_is_written_aside_names_its_place_as_the_best_one(tmp_path: Path) -> None:
    settings = {"max_steps": 2, "save_strategy": "best", "save_total_limit": 1, "per_device_eval_batch_size": 8}
    judged = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "reward", "greater_is_better": True}
    rows = {"eval_dataset": plain_rows(4)}
    run = StagedRun(lambda: build_trainer(tmp_path, arguments=rows, **judged, **settings))
    (tmp_path / "checkpoint-30-backup").mkdir()
    fit(run.trainer, resume_from=None)
    best = Path(run.trainer.state.best_model_checkpoint)
    assert best == tmp_path / best.name and best.is_dir()
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)
    assert (tmp_path / "checkpoint-30-backup").is_dir(), "transformers' own clearing up at the end deletes it"
    assert run.trainer.args.save_total_limit == 1


def test_the_best_checkpoint_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative output_dir: the state names a path that only the folder of the first start has."""
    steps = {"save_strategy": "steps", "save_steps": 1}
    fit(NotedRun(lambda: build_trainer(tmp_path, max_steps=2, **steps)).trainer, resume_from=None)
    for step in (1, 2):
        it = RolloutState(run_id="m", step=step, next_seq=9, rounds=step, unusable=[], consumed_below=step, consumed=[])
        state = json.loads((saved := tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text())
        named = {"best_global_step": 1, "best_model_checkpoint": "relative/checkpoint-1"}
        saved.write_text(json.dumps(state | named))
        checkpoint_folders.save(tmp_path / f"checkpoint-{step}", it)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    again = StagedRun(lambda: build_trainer(tmp_path, max_steps=3, **steps))
    fit(again.trainer, resume_from=tmp_path / "checkpoint-2")
    assert again.trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_the_hub_gets_a_checkpoint_from_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload goes on in a thread: the folder that a checkpoint is written into is gone before it ends."""
    run = StagedRun(lambda: build_trainer(tmp_path, max_steps=1, save_strategy="steps", save_steps=1))
    run.trainer.args.push_to_hub = True
    pushed: list[Path] = []
    monkeypatch.setattr(type(run.trainer), "_push_from_checkpoint", lambda self, folder: pushed.append(Path(folder)))
    monkeypatch.setattr(type(run.trainer), "_finish_current_push", lambda self: None)
    fit(run.trainer, resume_from=None)
    assert pushed == [tmp_path / "checkpoint-1"] and (pushed[0] / "model.safetensors").exists()
    assert run.trainer.args.push_to_hub


def test_the_hub_leaves_out_what_begins_with_an_underscore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it gets nothing of ours: the names of our files in an output_dir begin like that."""
    patterns: list[list[str]] = []
    hub = SimpleNamespace(upload_folder=lambda **options: patterns.append(options["ignore_patterns"]))
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: hub)
    trainer = build_trainer(tmp_path)
    trainer.hub_model_id, trainer.push_in_progress = "me/model", SimpleNamespace(is_done=lambda: True, jobs=[])
    trainer.push_to_hub()
    assert patterns == [["_*", "checkpoint-*"]]


# --- Metrics: to what `report_to` names, to TensorBoard where it names none, and always to metrics.jsonl ---------


class Tracker(TrainerCallback):
    """A reporter as transformers has them for wandb and trackio: made without arguments, told by `on_log`."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.told.append({"step": state.global_step, **(logs or {})})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InProcessRun:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "tracker", Tracker)
    return InProcessRun(lambda: build_trainer(tmp_path / "outputs", report_to=["tracker"]))


def callback(run: InProcessRun, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
    return [it for it in run.trainer.callback_handler.callbacks if isinstance(it, kind)]


def test_what_report_to_names_is_told_everything(run: InProcessRun, tmp_path: Path) -> None:
    log = RunLog(tmp_path / "metrics.jsonl")
    curves = report(run.trainer, log, tmp_path / "tensorboard")
    run.train()
    log.close()
    assert curves() == tmp_path / "tensorboard"
    (tracker,) = callback(run, Tracker)
    steps = [entry for entry in tracker.told if "loss" in entry]
    assert [entry["step"] for entry in steps] == [1, 2]
    ours = {"async/staleness_mean", "async/rollouts_per_second", "async/trainer_wait_fraction"}
    assert ours | {"reward", "rewards/letters/mean", "completions/mean_length", "grad_norm"} <= steps[0].keys()
    written = lines_of(tmp_path / "metrics.jsonl")
    assert [set(entry) - {"monotonic_s"} for entry in written] == [set(entry) for entry in tracker.told]
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))  # nobody named another one


def test_a_tensorboard_of_the_users_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    run = InProcessRun(lambda: build_trainer(tmp_path / "outputs", report_to=["tensorboard"]))
    log = RunLog(tmp_path / "metrics.jsonl")
    curves = report(run.trainer, log, tmp_path / "tensorboard")
    run.train()
    log.close()
    assert callback(run, CurvesCallback) == []
    assert curves() == tmp_path / "mine"
    assert not (tmp_path / "tensorboard").exists()
    assert list((tmp_path / "mine").rglob("events.out.tfevents.*"))
