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
from kit.in_process import InProcessWorker, jobs_of
from kit.tiny_trainer import build_model, build_tokenizer, build_trainer, length, letters, plain_rows

pytestmark = pytest.mark.integration


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
