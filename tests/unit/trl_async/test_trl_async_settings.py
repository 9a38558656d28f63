"""Which of TRL's settings its rollouts keep, which are refused, and that no row is too old when TRL takes it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import date
from typing import Any

import numpy as np
import pytest
from unit_fakes import Bench

from async_grpo.errors import UnsupportedError, UsageError
from async_grpo.setup.grpo_config.values import parsed
from async_grpo.trl_async.config import last_version, refuse, schedule_of, worker_values
from async_grpo.trl_async.rollouts import rows_of
from async_grpo.trl_async.samples import advantages_of


@dataclass
class Config:
    """The fields of TRL's `AsyncGRPOConfig` that are read; tests/integration compares with the class."""

    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    weight_sync_steps: int = 1
    num_generations: int = 4
    max_staleness: int = 4
    max_steps: int = -1
    token_budget: int | None = 0
    max_completion_length: int = 2048
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calling_iterations: int | None = None
    bf16: bool = True
    fp16: bool = False
    vllm_server_base_url: str = "http://localhost:8000"
    vllm_server_timeout: float = 240.0
    request_timeout: int = 600
    queue_maxsize: int = 1024
    fork_threshold_tokens: int = 1024
    max_inflight_tasks: int = -1
    log_completions: bool = False
    num_completions_to_print: int | None = None


def config(**changes: Any) -> Any:
    return Config(**changes)


def test_what_cannot_be_kept_is_refused_with_the_way_out() -> None:
    refuse(config())
    for token_budget in (None, 512):
        with pytest.raises(UnsupportedError, match="Set token_budget=0 in AsyncGRPOConfig"):
            refuse(config(token_budget=token_budget))
    with pytest.raises(UnsupportedError, match=r"max_inflight_tasks=64 of AsyncGRPOConfig has no effect.*Leave it out"):
        refuse(config(max_inflight_tasks=64))
    with pytest.raises(UnsupportedError, match=r"vllm_server_base_url='http://gpu:1'.*own engine"):
        refuse(config(vllm_server_base_url="http://gpu:1"))
    with pytest.raises(UnsupportedError, match=r"queue_maxsize=8 of AsyncGRPOConfig has no effect.*when TRL asks"):
        refuse(config(queue_maxsize=8))
    refuse(config(max_staleness=0))
    with pytest.raises(UnsupportedError, match="Set max_staleness to at least 1"):
        refuse(config(max_staleness=0, gradient_accumulation_steps=2, per_device_train_batch_size=2))


def test_workers_sample_as_trls_configuration_says() -> None:
    values = parsed(worker_values(config(temperature=0.7, top_k=20, chat_template_kwargs={"enable_thinking": False})))
    assert (values["temperature"], values["top_k"], values["min_p"], values["bf16"]) == (0.7, 20, None, True)
    assert values["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(UsageError, match="chat_template_kwargs has a date"):  # the template would get a text
        worker_values(config(chat_template_kwargs={"at": date(2026, 1, 2)}))
    assert (values["num_generations"], values["per_device_train_batch_size"]) == (4, 8)
    few = parsed(worker_values(config(num_generations=16)))
    assert (few["num_generations"], few["per_device_train_batch_size"]) == (16, 16)


def test_the_last_version_samples_the_last_batch() -> None:
    assert last_version(config()) is None
    assert [last_version(config(max_steps=steps, weight_sync_steps=2)) for steps in (1, 2, 3)] == [1, 1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 0},
        {"max_staleness": 1},
        {"max_staleness": 1, "gradient_accumulation_steps": 3},
        {"num_generations": 8, "per_device_train_batch_size": 2, "max_staleness": 4},  # a group lasts four versions
        {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_staleness": 1},
        {"num_generations": 3, "per_device_train_batch_size": 4, "weight_sync_steps": 2, "max_staleness": 2},
    ],
)
def test_no_row_is_too_old_when_trl_takes_it_however_slow_the_workers(changes: dict[str, Any]) -> None:
    args = config(**changes)
    refuse(args)
    drawn = random.Random(0)
    bench = Bench(schedule_of(args))
    bench.publisher.version = 1
    sampled_by: dict[int, int] = {}

    def workers() -> None:
        for seq in bench.queue.unclaimed():
            bench.queue.claim(seq)
            sampled_by[seq] = bench.publisher.version or 0
        one = drawn.choice(sorted(bench.queue.claimed))
        bench.queue.finish(one, version=sampled_by[one])

    bench.queue.on_wait = workers
    bench.source.advance(1)
    rows: list[int] = []  # the version that sampled each, in TRL's queue
    micro_batch = args.per_device_train_batch_size
    micro_batches = args.gradient_accumulation_steps * args.weight_sync_steps
    taken = 0
    for version in range(1, 30):
        fetched = micro_batch * (micro_batches * version + 1)  # one micro-batch ahead of those trained on
        while taken < fetched:
            if not rows:
                ages = [group.policy_version for group in bench.source.take(version)]
                rows = [age for age in reversed(ages) for _ in range(args.num_generations)]
            assert version - rows.pop() <= args.max_staleness
            taken += 1
        bench.step_done(version + 1)


def test_advantages_are_those_of_the_group_and_none_without_a_reward() -> None:
    none = float("nan")
    totals, advantages, spread = advantages_of(np.array([[1, 1], [none, 0], [none, none], [1, none]], np.float32))
    assert totals.tolist()[:2] == [2, 0] and np.isnan(totals[2]) and totals[3] == 1
    assert advantages[2] == 0 and spread == pytest.approx(np.std([2, 0, 1]))
    assert advantages[[0, 1, 3]] == pytest.approx(np.array([1, -1, 0]) / np.std([2, 0, 1]), abs=1e-6)
    assert np.isnan(advantages_of(np.full((2, 1), none, np.float32))[2])


def test_rows_come_in_the_order_of_the_dataset_again_and_again() -> None:
    rows = rows_of([{"prompt": "a"}, {"prompt": "b"}])
    assert [next(rows)["prompt"] for _ in range(5)] == ["a", "b", "a", "b", "a"]
    with pytest.raises(UsageError, match="has no rows"):
        next(rows_of([]))
