"""What a worker sent never ends the server: a group is refused when it comes, or TRL trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared_with_trl import settings
from in_process import QWEN3_CHAT_TEMPLATE, InProcessRun, training_logs
from test_trl_tools import assert_same_counts, counts_tool_results, plain_scripted, says_twelve, scripted

from async_grpo.errors import BadFileError
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.records import RolloutGroup
from async_grpo.training.groups import refuser_of

pytestmark = pytest.mark.integration

TOOL_CALL = '<tool_call>\n{"name": "odd", "arguments": {}}\n</tool_call>'


def calls_odd(prompt: str, place: int) -> str:
    if "<tool_response>" in prompt:
        return "twelve"
    return f"let me see{TOOL_CALL}" if place % 2 == 0 else "eleven"


def with_tool(folder: Path, returned: Any, **arguments: Any) -> Callable[..., Any]:
    def odd() -> Any:
        """Return something odd."""
        return returned

    rewards = [says_twelve, counts_tool_results]
    tools = {"tools": [odd]}
    limits: dict[str, Any] = {"max_completion_length": 256, "max_steps": 1}
    return settings(folder, tools, chat_template=QWEN3_CHAT_TEMPLATE, reward_funcs=rewards, **limits, **arguments)


@pytest.mark.parametrize(
    "returned",
    {
        "strings": ["a", "b"],
        "objects": [{"a": 1}],
        "nothing": None,
        "bytes": b"\xff",
        "a scalar": np.float32(1.5),
        "nested": [[["a"]]],
        "a lone surrogate in a list": ["\ud800"],
        "a list of nothing": [None],
        "a number for a type": [{"type": 1}],
        "text parts": [{"type": "text", "text": "12"}],
    }.values(),
    ids=str,
)
def test_what_a_tool_returns_is_what_trl_makes_of_it(returned: Any, tmp_path: Path) -> None:
    get_trainer = with_tool(tmp_path, returned)
    run = scripted(get_trainer, calls_odd)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_odd)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> InProcessRun:
    return scripted(with_tool(tmp_path_factory.mktemp("run"), "12"), calls_odd)


def refused(group: RolloutGroup) -> list[dict[str, Any]]:
    size, tokens = group.job.num_generations, len(group.completion_ids)
    lengths = np.asarray([tokens, *[0] * (size - 1)], np.int32)
    return [
        {"prompt_ids": np.zeros(0, np.int32)},
        {"prompt_ids": np.full(3, 10**8, np.int32)},
        {"completion_ids": np.full(tokens, 10**8, np.int32)},
        {"completion_lengths": lengths},
        {"sampling_logprobs": np.full(tokens, -1e30, np.float32)},
        {"sampling_logprobs": np.full(tokens, 1.0, np.float32)},
        {"rewards": np.zeros((size, 5), np.float32), "reward_names": tuple("abcde")},
        {"completions": [[{"role": "tool", "content": [{"type": "image"}]}]] * size},
        {"prompts": [[{"role": "user", "content": [{"type": "image"}]}]]},
        {"prompts": [[]]},
        {"prompts": [None]},
    ]


def trained_on(group: RolloutGroup) -> Iterator[dict[str, Any]]:
    """What TRL takes, or leaves out of its table of completions."""
    size = group.job.num_generations
    odd: list[Any] = [None, 1, "text", [], [1], ["a"], [{}], [{"role": 1, "content": ["a"]}], {"a": 1}, "\ud800"]
    for value in odd:
        yield {"completions": [value] * size}
        if value:
            yield {"prompts": [value]}
    for column in ([], [None] * size, [{}] * size, ["a"] * (size + 3)):
        yield {"extra_columns": {"column": column}}
    yield {"metrics": {"": [1.0], "tools/call_frequency": []}}
    yield {"rewards": np.full_like(group.rewards, np.nan)}


def test_what_would_end_trl_is_refused(run: InProcessRun) -> None:
    refuse = refuser_of(run.trainer)
    for group in run.groups:
        refuse(group)
    for change in refused(run.groups[0]):
        with pytest.raises(BadFileError):
            refuse(replace(run.groups[0], **change))


def test_the_run_goes_on_with_what_is_not_refused(run: InProcessRun, tmp_path: Path) -> None:
    changed = [decode_group(encode_group(replace(run.groups[0], **change))) for change in trained_on(run.groups[0])]
    refuse = refuser_of(run.trainer)
    for group in changed:
        refuse(group)
    left = iter(changed)

    class Replaced(InProcessRun):
        def _generate(self) -> list[RolloutGroup]:
            return [next(left), *run.groups[1:]]

    get_trainer = with_tool(tmp_path, "12", log_completions=True)

    def longer() -> Any:
        trainer = get_trainer()
        trainer.args.max_steps = len(changed)
        return trainer

    logs = Replaced(longer).train().logs
    assert len(logs) == len(changed)
    assert all(np.isfinite(entry["grad_norm"]) for entry in logs)


def test_a_group_that_is_refused_counts_as_a_broken_file(run: InProcessRun, tmp_path: Path) -> None:
    refuse = refuser_of(run.trainer)
    job = run.groups[0].job
    with (
        closing(ServerQueue.open(tmp_path, job.run_id, watch_workers=False, refuse=refuse)) as server,
        closing(WorkerQueue.open(tmp_path, 1, "cpu")) as worker,
    ):
        server.submit(job)
        for _ in range(3):
            [claim] = worker.claim(1)
            group = replace(run.groups[0], job=claim.job, attempt=claim.attempt, worker="dev1", prompts=[[]])
            worker.complete(claim, group)
            [entry] = server.finished()
            assert server.take(entry) is None
        assert "it has an empty prompt" in server.given_up[job.seq].reason
