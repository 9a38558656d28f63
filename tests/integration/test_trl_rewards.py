"""Reward functions and reward models: those of TRL, with the same result in a worker."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from async_grpo.queue.codec import decode_job, encode_job
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.training.job_issuer import plain_fields
from kit.compared_with_trl import run_as_trl_would, settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of, training_logs
from kit.recorded_batches import replay_with_trl
from kit.tiny_trainer import (
    QWEN3_CHAT_TEMPLATE,
    build_model,
    build_tokenizer,
    build_trainer,
    length,
    letters,
    plain_rows,
    text_of,
)

pytestmark = pytest.mark.integration


async def async_letters(completions: list[Any], **columns: Any) -> list[float]:
    await asyncio.sleep(0)
    return letters(completions, **columns)


def test_weighted_rewards_sync_and_async(tmp_path: Path) -> None:
    run, _ = run_as_trl_would(
        settings(tmp_path, reward_funcs=[letters, async_letters, length], reward_weights=[1.0, 0.5, 0.1])
    )
    assert run.groups[0].reward_names == ("letters", "async_letters", "length")
    assert all((group.rewards[:, 0] == group.rewards[:, 1]).all() for group in run.groups)


@pytest.mark.parametrize("chat_template", [None, QWEN3_CHAT_TEMPLATE], ids=["plain", "conversational"])
def test_reward_functions_get_prompts_and_dataset_columns(chat_template: str | None, tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def reaches_target(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], target: list[int], **_: Any
    ) -> list[float]:
        seen.extend((text_of(prompt), number) for prompt, number in zip(prompts, target, strict=True))
        texts = [text_of(completion) for completion in completions]
        return [-abs(len(t) - n) + len(ids) / 10 for t, n, ids in zip(texts, target, completion_ids, strict=True)]

    run_as_trl_would(settings(tmp_path, chat_template=chat_template, reward_funcs=reaches_target))
    assert seen
    assert all(number == len(text) for text, number in seen)


def test_what_reward_functions_log_reaches_the_trainer(tmp_path: Path) -> None:
    def logging_reward(completions: list[str], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("first_letter", [completion[:1] for completion in completions])
        log_metric("digits", sum(c.isdigit() for completion in completions for c in completion) / len(completions))
        return letters(completions)

    run, plain = run_as_trl_would(settings(tmp_path, reward_funcs=logging_reward))
    assert all("digits" in entry for entry in run.logs)
    assert run.trainer._logs["extra"] == plain._logs["extra"]
    assert len(run.trainer._logs["extra"]["first_letter"]) == 8
    assert run.trainer._logs["completion"] == plain._logs["completion"]
    assert run.trainer._logs["prompt"] == plain._logs["prompt"]


def test_rewards_of_none(tmp_path: Path) -> None:
    def only_even(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
        return [None if n % 2 else score for n, score in zip(target, letters(completions), strict=True)]

    def only_short(completions: list[str], target: list[int], **_: Any) -> list[float | None]:
        return [None if n > 1 else 1.0 - score for n, score in zip(target, letters(completions), strict=True)]

    run, _ = run_as_trl_would(settings(tmp_path, reward_funcs=[only_even, only_short], max_steps=3))
    for group in run.groups:
        target = group.job.row["target"]
        assert torch.from_numpy(group.rewards).isnan()[0].tolist() == [target % 2 == 1, target > 1]
    unscored = [group for group in run.groups if torch.from_numpy(group.rewards).isnan().all()]
    assert unscored, "some group must have had no reward at all"


@pytest.mark.parametrize(("wrong", "scale_rewards"), [(math.inf, "group"), (-math.inf, "batch"), (math.nan, "group")])
def test_rewards_that_are_not_finite_do_what_they_do_in_trl(wrong: float, scale_rewards: str, tmp_path: Path) -> None:
    def sometimes(completions: list[str], target: list[int], **_: Any) -> list[float]:
        return [wrong if n == 3 else score for n, score in zip(target, letters(completions), strict=True)]

    get_trainer = settings(tmp_path, reward_funcs=sometimes, scale_rewards=scale_rewards, max_steps=3)
    run = InProcessRun(get_trainer).train()
    plain = replay_with_trl(get_trainer, run.batches)
    assert any(not np.isfinite(group.rewards).all() for group in run.groups), "some reward must have been wrong"
    for ours, theirs in zip(run.logs, training_logs(plain), strict=True):
        for name in ("loss", "grad_norm", "reward", "reward_std", "rewards/sometimes/mean"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5, nan_ok=True), name
    assert all(math.isfinite(entry["loss"]) and math.isfinite(entry["grad_norm"]) for entry in run.logs)


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


STATE = ("global_step", "max_steps", "epoch", "num_train_epochs", "train_batch_size", "is_world_process_zero")


def test_reward_functions_see_the_state_of_the_trainer(tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def curriculum(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        seen.append(tuple(getattr(trainer_state, name) for name in STATE))
        progress = trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch
        return [progress * score for score in letters(completions)]

    run_as_trl_would(settings(tmp_path, reward_funcs=curriculum, max_steps=5))
    in_workers, in_trl = seen[:-5], seen[-5:]  # once a group, once a batch
    assert in_workers == [state for state in in_trl for _ in range(len(in_workers) // 5)]
    assert [state[:4] for state in in_trl][::4] == [(0, 5, 0, 2), (4, 5, pytest.approx(4 / 3), 2)]


def test_the_state_is_that_of_the_time_when_the_job_was_issued(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def note_state(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        seen.append((trainer_state.global_step, trainer_state.epoch))
        return letters(completions)

    run = InProcessRun(settings(tmp_path, reward_funcs=note_state, max_steps=4), fresh_every=2).train()
    issued = [group.job.trainer_state for group in run.groups]
    assert seen == [(state["global_step"], state["epoch"]) for state in issued]
    assert sorted({step for step, _ in seen}) == [0, 1, 2, 3], "not that of the weights, 0 and 2"


def test_a_reward_model(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    config = build_model(tokenizer).config
    config.num_labels = 1
    torch.manual_seed(0)
    judge = Qwen3ForSequenceClassification(config).eval()
    run, _ = run_as_trl_would(
        settings(tmp_path, {"reward_processing_classes": [tokenizer, None]}, reward_funcs=[judge, letters])
    )
    assert len({group.rewards[0, 0].item() for group in run.groups}) > 1


def test_what_a_callback_puts_into_the_state_can_be_sent_to_workers() -> None:
    """Numbers of numpy would be refused in the middle of the run."""
    state = SimpleNamespace(epoch=np.float64(0.5), level=np.int64(2), hard=np.bool_(True), kind="sums", best=[1.0])
    sent = plain_fields(state)
    [job] = jobs_of([{"prompt": "a"}])
    received = decode_job(encode_job(replace(job, trainer_state=sent))).trainer_state
    assert received == {"epoch": 0.5, "level": 2, "hard": True, "kind": "sums"}
