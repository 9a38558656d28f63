"""What a worker sent never ends the server: a group is refused when it comes, or TRL trains on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from async_grpo.envs import Endpoint
from async_grpo.errors import BadFileError
from async_grpo.queue import ServerQueue, WorkerQueue
from async_grpo.queue.codec import decode_group, encode_group
from async_grpo.records import RolloutGroup
from async_grpo.training.groups_for_trl import refuser_of
from kit.agents import agent_worker, posted, said
from kit.changed_groups import changed
from kit.compared_with_trl import run_as_scripted_trl_would, scripted, settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, chat_rows
from kit.tools import counts_tool_results, says_twelve

TEXTS = [f"text {letter}." for letter in "abcdefgh"]
CALL = '<tool_call>\n{{"name": "odd", "arguments": {{"number": {number}}}}}\n</tool_call>'


def calls_odd(prompt: str, index: int) -> str:
    """Each completion of each prompt calls the tool for another value."""
    if "<tool_response>" in prompt:
        return "twelve"
    number = 2 * [text in prompt for text in TEXTS].index(True) + index % 2
    return f"let me see{CALL.format(number=number)}"


def with_tool(folder: Path, returned: Sequence[Any], **arguments: Any) -> Callable[..., Any]:
    return trainer_with(folder, {"tools": [environment(returned)().odd]}, returned, **arguments)


def with_environment(folder: Path, returned: Sequence[Any]) -> Callable[..., Any]:
    return trainer_with(folder, {"environment_factory": environment(returned)}, returned)


def environment(returned: Sequence[Any]) -> type[Any]:
    class Environment:
        def reset(self, **row: Any) -> str:
            return ""

        def odd(self, number: int) -> Any:
            """Return something odd.

            Args:
                number: Which.
            """
            return returned[number % len(returned)]

    return Environment


def trainer_with(folder: Path, given: dict[str, Any], returned: Sequence[Any], **arguments: Any) -> Callable[..., Any]:
    steps = -(-len(returned) // 8)  # 4 prompts of 2 completions a step
    rewards = [says_twelve, counts_tool_results]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in TEXTS])
    limits: dict[str, Any] = {"max_completion_length": 256, "max_steps": steps, "train_dataset": rows, **arguments}
    return settings(folder, given, chat_template=QWEN3_CHAT_TEMPLATE, reward_funcs=rewards, **limits)


ODD = {
    "strings": ["a", "b"],
    "objects": [{"a": 1}],
    "nothing": None,
    "bytes": b"\xff",
    "a scalar": np.float32(1.5),
    "an array": np.ones((2, 2)),
    "nested": [[["a"]]],
    "a tuple": ("a", 1),
    "a set": {1},
    "keys that are numbers": {1: {"type": "text"}},
    "a lone surrogate in a list": ["\ud800"],
    "a list of nothing": [None],
    "a number for a type": [{"type": 1}],
    "text parts": [{"type": "text", "text": "12"}],
    "an empty list": [],
}
NO_TEXT_OF_TRL = {  # plain TRL ends with an exception, or never comes to an end
    "a lone surrogate": "a\ud800",
    "ten million characters": "x" * 10_000_000,
    "an image that is none": [{"type": "image", "image": "x.png"}],
    "an image that is missing": [{"type": "image"}],
    "a text that is none": [{"type": "text", "text": 12}],
}


@pytest.mark.parametrize("trainer_with", [with_tool, with_environment])
def test_what_a_tool_returns_is_what_trl_makes_of_it(trainer_with: Any, tmp_path: Path) -> None:
    run, _ = run_as_scripted_trl_would(trainer_with(tmp_path, [*ODD.values()]), calls_odd)
    assert [entry["tools/failure_frequency"] for entry in run.logs] == [0, 0]
    results = [completion[1]["content"] for group in run.groups for completion in group.completions]
    assert {*map(str, ODD.values())} == {*map(str, results)}


@pytest.mark.parametrize("trainer_with", [with_tool, with_environment])
def test_what_trl_does_not_survive_costs_a_group_at_most(trainer_with: Any, tmp_path: Path) -> None:
    values = [*NO_TEXT_OF_TRL.values()]
    worker = InProcessWorker(trainer_with(tmp_path, values)(), ScriptedEngine(ScriptedGenerator(calls_odd)))
    groups: list[RolloutGroup] = []
    for job in jobs_of([{"prompt": [{"role": "user", "content": text}]} for text in TEXTS[:3]]):
        with suppress(Exception):  # of the group, which fails
            groups += worker.rollouts([job])
    assert is_refused_or_trained_on(groups, trainer_with(tmp_path / "server", ["12"])())
    assert groups[0].job.seq == 0, "the model reads a text of what is too long, or cannot be encoded"


def is_refused_or_trained_on(groups: list[RolloutGroup], trainer: Any) -> bool:
    """Whether the server would survive the groups. Raises what would end it."""
    refuse = refuser_of(trainer)
    for group in groups:
        with suppress(BadFileError):
            refuse(decode_group(encode_group(group)))
    return True


@pytest.mark.parametrize(
    "content",
    [
        *(None, 1, "a\ud800", "x" * 100_000, {"a": 1}, [], ["a"], [None], [[["a"]]], [{"a": 1}], [{"type": 1}]),
        *([{"type": "text"}], [{"type": "text", "text": None}], [{"type": "image_url", "image_url": {"url": "x"}}]),
    ],
    ids=lambda content: str(content)[:20],
)
def test_what_an_agent_puts_into_a_message_costs_a_group_at_most(content: Any, tmp_path: Path) -> None:
    statuses: list[int] = []

    def agent(prompt: list[Any], endpoint: Endpoint) -> dict[str, Any]:
        first = said(endpoint, prompt)
        answer = posted(endpoint, [*prompt, first, {"role": "tool", "tool_call_id": "1", "content": content}])
        statuses.append(answer.status)
        return {"seen": content}

    worker = agent_worker(tmp_path, agent, ScriptedEngine, lambda prompt, index: "text")
    groups: list[RolloutGroup] = []
    with suppress(Exception):  # of the group, which fails
        groups += worker.rollouts(jobs_of(chat_rows(1)))
    assert is_refused_or_trained_on(groups, worker.trl.trainer)
    # 401: of the other completion, where its group has failed before it asked
    assert set(statuses) <= {200, 400, 401}, "an answer, or what is wrong with the request"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> InProcessRun:
    return scripted(with_tool(tmp_path_factory.mktemp("run"), ["12"]), calls_odd)


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
        {"policy_version": 10**6},
        {"policy_version": -1},
        {"token_versions": np.full(tokens, 10**6, np.int32)},
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
    odd = [decode_group(encode_group(replace(run.groups[0], **change))) for change in trained_on(run.groups[0])]
    refuse = refuser_of(run.trainer)
    for group in odd:
        refuse(group)
    assert_is_trained_on([*odd, *run.groups[: -len(odd) % 4]], tmp_path)


def assert_is_trained_on(groups: Sequence[RolloutGroup], folder: Path) -> None:
    """Four of the groups in each step."""
    left = iter(groups)

    class Replaced(InProcessRun):
        def _generate(self) -> list[RolloutGroup]:
            return [next(left) for _ in range(4)]

    steps = len(groups) // 4
    logs = Replaced(with_tool(folder, ["12"], log_completions=True, max_steps=steps)).train().logs
    assert len(logs) == steps
    assert all(np.isfinite(entry["grad_norm"]) for entry in logs)


def test_a_group_with_any_fields_changed_is_refused_or_trained_on(run: InProcessRun, tmp_path: Path) -> None:
    """`benchmarks/fuzz_groups.py` hands such groups to a real run, for as long as it is given."""
    refuse, random, accepted = refuser_of(run.trainer), Random(0), []
    for _ in range(300):
        with suppress(BadFileError):
            group = decode_group(encode_group(changed(run.groups[0], random)))
            refuse(group)
            accepted.append(group)
    assert 16 <= len(accepted) < 300
    assert_is_trained_on(accepted[:16], tmp_path)


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
