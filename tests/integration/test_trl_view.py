"""The trainer that rewards, tools and overrides read in a worker: what it says is TRL's, or it refuses to be used."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import GRPOTrainer

from async_grpo.errors import RunRefused
from async_grpo.rollout.trl_view import NOT_HERE
from kit.in_process import InProcessWorker, jobs_of
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, letters, plain_rows

pytestmark = pytest.mark.integration


def reading(tmp_path: Path, look: Callable[[Any], None], **changes: Any) -> Callable[..., GRPOTrainer]:
    """A `get_trainer()` whose reward function looks at the trainer that it has in its closure."""

    def get_trainer() -> GRPOTrainer:
        def looks(completions: list[Any], **_: Any) -> list[float]:
            look(trainer)
            return letters(completions)

        trainer = build_trainer(tmp_path, reward_funcs=looks, **changes)
        return trainer

    return get_trainer


class AddsOfPrompts(GRPOTrainer):
    def _tokenize_prompts(self, prompts: Any) -> Any:
        self._metrics["train"]["prompts"].append(len(prompts))
        return super()._tokenize_prompts(prompts)


def test_what_is_added_while_prompts_are_made_travels_with_the_next_group(tmp_path: Path) -> None:
    worker = InProcessWorker(build_trainer(tmp_path, trainer_class=AddsOfPrompts))
    groups = worker.generate(jobs_of(plain_rows(2)))
    assert [worker.trl.score([group])[0].added for group in groups] == [{"train/prompts": [2.0, 2.0]}, {}]


def test_a_value_counts_once(tmp_path: Path) -> None:
    def look(trainer: Any) -> None:
        trainer._metrics["train"]["calls"].append(1.0)
        trainer._metrics["eval"]["calls"].append(2.0)

    worker = InProcessWorker(reading(tmp_path, look)())
    groups = worker.generate(jobs_of(plain_rows(3)))
    together = worker.trl.score(groups)
    assert [scores.added for scores in together] == [{"train/calls": [1.0], "eval/calls": [2.0]}, {}, {}]
    assert worker.trl.score(groups[:1])[0].added["train/calls"] == [1.0]


WHY_AND_WAY = r"[a-z].+\. [A-Z].+, or train in one process \(without --distributed\)\.$"


def test_each_reason_has_a_way_out() -> None:
    assert not [name for name, why in NOT_HERE.items() if not re.match(r"[a-z].+\. [A-Z]", why)]


def swallowing(look: Callable[[Any], Any]) -> Callable[[Any], None]:
    def looks(trainer: Any) -> None:
        with suppress(Exception):
            look(trainer)

    return looks


@pytest.mark.parametrize("caught", [False, True])
@pytest.mark.parametrize(
    ("name", "look"),
    [
        ("optimizer", lambda trainer: trainer.optimizer.param_groups[0]["lr"]),
        ("optimizer", lambda trainer: hasattr(trainer.optimizer, "state")),
        ("lr_scheduler", lambda trainer: trainer._get_learning_rate()),
        ("ref_model", lambda trainer: trainer.ref_model(torch.zeros(1, 1).long())),
        ("control", lambda trainer: setattr(trainer.control, "should_training_stop", True)),
        ("callback_handler", lambda trainer: trainer.add_callback(TrainerCallback())),
        ("_logs", lambda trainer: trainer._logs["extra"]["mine"].append(1)),
        ("_step", lambda trainer: trainer._step % 2),
        ("_step", lambda trainer: trainer._step == 0),
        ("_buffered_inputs", lambda trainer: trainer._buffered_inputs[0]),
        ("log", lambda trainer: trainer.log({"mine": 1.0})),
        ("save_model", lambda trainer: trainer.save_model()),
        ("_metrics", lambda trainer: trainer._metrics["train"]["reward"][-1]),
        ("_metrics", lambda trainer: "reward" in trainer._metrics["train"]),
        ("_metrics", lambda trainer: [*trainer._metrics["train"].items()]),
        ("_metrics", lambda trainer: trainer._metrics["train"].__setitem__("mine", [1.0])),
        ("state.level", lambda trainer: setattr(trainer.state, "level", 1)),
    ],
)
def test_what_no_worker_has_ends_the_run_when_it_is_used(
    name: str, look: Callable[[Any], Any], caught: bool, model_folder: str, tmp_path: Path
) -> None:
    get_trainer = reading(tmp_path, swallowing(look) if caught else look, model=model_folder, beta=0.1)
    worker = InProcessWorker(worker_of(get_trainer))
    groups = worker.generate(jobs_of(plain_rows(1)))
    with pytest.raises(RunRefused, match=rf"^trainer\.{name}.* cannot be used in a worker: {WHY_AND_WAY}"):
        worker.trl.score(groups)


def worker_of(get_trainer: Callable[..., GRPOTrainer]) -> GRPOTrainer:
    from async_grpo.setup.worker_build import built_for_a_worker

    with built_for_a_worker(1):
        return get_trainer()


def test_a_reward_logs_in_threads_of_its_own(tmp_path: Path) -> None:
    """Also while other groups are generated, whose code runs at the same time."""
    kept = ThreadPoolExecutor(1)

    def logs(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        kept.submit(log_extra, "mine", [1] * len(completions)).result()
        kept.submit(log_metric, "also", 2.0).result()
        return letters(completions)

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=logs))
    [group] = worker.generate(jobs_of(plain_rows(1)))
    with worker.trl.view.during(group.job, group.version):  # a dialogue, say
        [scores] = worker.trl.score([group])
    assert scores.extra_columns == {"mine": [1] * len(group.rows)} and scores.metrics == {"also": [2.0]}


def test_the_policy_may_be_used_where_its_weights_stay(tmp_path: Path) -> None:
    def look(trainer: Any) -> None:
        with torch.no_grad():
            trainer.model(torch.zeros(1, 1).long())

    worker = InProcessWorker(reading(tmp_path, look)())
    [group] = worker.generate(jobs_of(plain_rows(1)))
    worker.trl.score([group])
    for stale in (replace(group.job, born_version=1), replace(group.job, purpose="eval")):
        with pytest.raises(RunRefused, match=r"trainer\.model in a reward function cannot be used"):
            worker.trl.score([replace(group, job=stale)])
    worker.trl.view.policy_is_here = False  # as with vLLM
    with pytest.raises(RunRefused, match=r"trainer\.model in a reward function cannot be used"):
        worker.trl.score([group])


def test_the_environments_of_another_group_are_not_in_a_closure(tmp_path: Path) -> None:
    class Nothing:
        def reset(self, **_: Any) -> str:
            return ""

    built = {"chat_template": QWEN3_CHAT_TEMPLATE, "train_dataset": chat_rows()}
    get_trainer = reading(
        tmp_path, lambda trainer: len(trainer.environments), **built, arguments={"environment_factory": Nothing}
    )
    with pytest.raises(RunRefused, match="Use the argument environments"):
        InProcessWorker(get_trainer()).rollouts(jobs_of(chat_rows(1)))


def test_all_that_training_changes_has_a_stand_in(tmp_path: Path) -> None:
    """A name that a new TRL or transformers trains is here: let it be true in workers, or put it into `NOT_HERE`."""
    before: dict[str, Any] = {}
    found: set[str] = set()

    def look(trainer: Any) -> None:
        if before and trainer.state.global_step == 2:
            found.update(name for name in before if before[name] is not vars(trainer)[name])

    trainer = reading(tmp_path, look, max_steps=3)()
    before.update(vars(trainer))
    trainer.train()
    of_the_loop = {"_created_lr_scheduler", "_mixed_mesh_grads"}  # which no worker runs
    assert found - NOT_HERE.keys() - of_the_loop == {"state", "is_in_train"}, "they are true in workers"
