"""What TRL does around the training step: callbacks, evaluation, checkpoints, the names of metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from trl import GRPOTrainer

from async_grpo.errors import UnsupportedError
from async_grpo.setup.overrides import check_callbacks
from kit.compared_with_trl import settings
from kit.in_process import InProcessRun
from kit.tiny_trainer import build_trainer, plain_rows

pytestmark = pytest.mark.integration


def test_callbacks_run_in_the_trainer_only(tmp_path: Path) -> None:
    class Counter(TrainerCallback):
        def __init__(self) -> None:
            self.begun = self.steps = self.logged = self.ended = 0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.begun += 1

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps += 1

        def on_log(self, *_: Any, **__: Any) -> None:
            self.logged += 1

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.ended += 1

    counters: list[Counter] = []

    def get_trainer() -> GRPOTrainer:
        counters.append(Counter())
        return build_trainer(tmp_path, arguments={"callbacks": [counters[-1]]})

    InProcessRun(get_trainer).train()
    of_trainer, of_worker = counters
    assert (of_trainer.begun, of_trainer.steps, of_trainer.ended) == (1, 2, 1)
    assert of_trainer.logged == 3  # two steps and the summary
    assert of_worker.begun == of_worker.steps == of_worker.logged == of_worker.ended == 0


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
        kept = [
            it for it in run.trainer.callback_handler.callbacks if isinstance(it, (ProgressCallback, PrinterCallback))
        ]
        assert kept == [given]
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
    get_trainer = settings(
        tmp_path,
        {"eval_dataset": plain_rows(4)},
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=4,
        eval_on_start=True,
    )
    run = InProcessRun(get_trainer).train()
    plain = get_trainer()
    plain.train()
    ours, theirs = (
        [entry for entry in trainer.state.log_history if "eval_reward" in entry] for trainer in (run.trainer, plain)
    )
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


def test_a_subclass_of_the_user_keeps_its_own_methods(tmp_path: Path) -> None:
    class Doubled(GRPOTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().compute_loss(*args, **kwargs)

    doubled = InProcessRun(settings(tmp_path, trainer_class=Doubled, max_steps=1)).train().logs[0]
    single = InProcessRun(settings(tmp_path, max_steps=1)).train().logs[0]
    assert doubled["loss"] == pytest.approx(2 * single["loss"], rel=1e-5)
