"""Reward functions and models: those of TRL, with the same result in a worker; and the trainer that they read there."""

from __future__ import annotations

import asyncio
import math
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForSequenceClassification, TrainerCallback
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from async_grpo.errors import RunRefused
from async_grpo.queue.codec import decode_job, encode_job
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.rollout.trl_view import NOT_HERE
from async_grpo.setup.worker_build import built_for_a_worker
from async_grpo.training.job_issuer import plain_fields
from kit.in_process import InProcessWorker, jobs_of
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, chat_rows, length, letters, plain_rows


async def async_letters(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return letters(completions, **columns)


@pytest.fixture
def threads_by_turns() -> Iterator[None]:
    """Python lets another thread run as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_by_turns")
def test_a_reward_model_shares_the_tokenizer_of_the_policy(tmp_path: Path) -> None:
    """Prompts are encoded while groups are scored, with padding; without a lock one prompt in eight is padded."""
    tokenizer = build_tokenizer()
    judge = Qwen3ForSequenceClassification(build_model(tokenizer, num_labels=1).config)
    trainer = build_trainer(tmp_path, reward_funcs=[judge], arguments={"reward_processing_classes": [tokenizer]})
    trainer.processing_class = tokenizer
    trl, jobs = RolloutTrainer(trainer), jobs_of(plain_rows())
    group = InProcessWorker(trainer).generate(jobs[:1])[0]
    group = replace(group, completions=["a", "longer"])
    with ThreadPoolExecutor(2) as threads:
        scoring = [threads.submit(trl.score, [group]) for _ in range(60)]
        prepared = []
        while not all(future.done() for future in scoring):
            prepared += [trl.prepare(job, 0) for job in jobs]
    assert len({tuple(future.result()[0].rewards.flatten().tolist()) for future in scoring}) == 1
    assert all([len(ids) for ids in one.prompt_ids] == [len(one.job.row["prompt"])] * 2 for one in prepared)


def test_a_call_with_several_groups_gives_each_what_a_call_of_its_own_does(tmp_path: Path) -> None:
    calls: list[int] = []

    def logging_reward(completions: list[str], target: list[int], log_extra: Any, log_metric: Any, **_: Any) -> Any:
        calls.append(len(completions))
        log_extra("first", [completion[:1] for completion in completions])
        log_metric("calls", 1.0)
        return [number + score for number, score in zip(target, letters(completions), strict=True)]

    def again(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("first", [completion[-1:] for completion in completions])
        return length(completions)

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=[logging_reward, async_letters, again]))
    groups = worker.generate(jobs_of(plain_rows(3)))
    alone = [worker.trl.score([group])[0] for group in groups]
    together = worker.trl.score(groups)
    assert calls == [2, 2, 2, 6]
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one.rewards, other.rewards)
        assert one.extra_columns == other.extra_columns and len(one.extra_columns["first"]) == 4
    assert [scores.metrics for scores in together] == [{"calls": [1.0]}, {}, {}], "a value of a call counts once"


def test_a_function_that_gives_no_number_in_a_joint_call_is_warned_of_once(tmp_path: Path, warnings: list[str]) -> None:
    def broken(completions: list[str], **_: Any) -> list[float]:
        return [math.nan for _ in completions]

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=[broken, length]))
    groups = worker.generate(jobs_of(plain_rows(5)))
    for _ in range(2):
        worker.trl.score(groups)
    assert len(warnings) == 1
    assert "the reward function broken gave no number, only NaN or None, for any of 10 completions" in warnings[0]


def test_columns_that_do_not_say_whose_they_are_make_groups_be_scored_alone(tmp_path: Path) -> None:
    def one_value(completions: list[str], log_extra: Any, **_: Any) -> list[float]:
        log_extra("mean", [sum(letters(completions)) / len(completions)])
        return letters(completions)

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=one_value))
    groups = worker.generate(jobs_of(plain_rows(2)))
    with pytest.raises(ValueError, match=r"log_extra\('mean'\) has 1 values for 4 completions"):
        worker.trl.score(groups)
    assert len(worker.trl.score(groups[:1])[0].extra_columns["mean"]) == 1


def test_what_a_callback_puts_into_the_state_can_be_sent_to_workers() -> None:
    """Numbers of numpy would be refused in the middle of the run."""
    state = SimpleNamespace(epoch=np.float64(0.5), level=np.int64(2), hard=np.bool_(True), kind="sums", best=[1.0])
    sent = plain_fields(state)
    [job] = jobs_of([{"prompt": "a"}])
    received = decode_job(encode_job(replace(job, trainer_state=sent))).trainer_state
    assert received == {"epoch": 0.5, "level": 2, "hard": True, "kind": "sums"}


# --- The trainer that rewards, tools and overrides read: what it says is TRL's, or it refuses to be used ---------


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
def test_what_no_worker_has_ends_the_run(name: str, look: Any, caught: bool, model_folder: str, tmp_path: Path) -> None:
    get_trainer = reading(tmp_path, swallowing(look) if caught else look, model=model_folder, beta=0.1)
    worker = InProcessWorker(worker_of(get_trainer))
    groups = worker.generate(jobs_of(plain_rows(1)))
    with pytest.raises(RunRefused, match=rf"^trainer\.{name}.* cannot be used in a worker: {WHY_AND_WAY}"):
        worker.trl.score(groups)


def worker_of(get_trainer: Callable[..., GRPOTrainer]) -> GRPOTrainer:
    with built_for_a_worker(1):
        return get_trainer()


@pytest.mark.parametrize("returned", [None, ["good", "bad"]])
def test_a_reward_that_gives_no_numbers_is_named(tmp_path: Path, returned: Any) -> None:
    def praise(**_: Any) -> Any:
        return returned

    worker = InProcessWorker(build_trainer(tmp_path, reward_funcs=[letters, praise]))
    with pytest.raises(TypeError, match=r"\. A reward function returns a list .* letters or praise did not\.$"):
        worker.trl.score(worker.generate(jobs_of(plain_rows(1))))


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
        with pytest.raises(RunRefused):
            worker.trl.score([replace(group, job=stale)])
    worker.trl.view.policy_is_here = False  # as with vLLM
    with pytest.raises(RunRefused):
        worker.trl.score([group])


def test_the_environments_of_another_group_are_not_in_a_closure(tmp_path: Path) -> None:
    class Nothing:
        def reset(self, **_: Any) -> str:
            return ""

    built = {"chat_template": qwen3_chat_template, "train_dataset": chat_rows()}
    get = reading(tmp_path, lambda it: len(it.environments), **built, arguments={"environment_factory": Nothing})
    with pytest.raises(RunRefused, match="Use the argument environments"):
        InProcessWorker(get()).rollouts(jobs_of(chat_rows(1)))


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
