"""Tools and a `rollout_func` in a worker. What they give is compared with plain TRL in `differential_rows`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from async_grpo.errors import RunRefused, UnsupportedError
from async_grpo.rollout.threads import main_thread
from kit.compared_with_trl import settings
from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.scripted_trl import Reply, calls_multiply
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, plain_rows
from kit.tools import multiply

pytestmark = pytest.mark.integration


def worker_with(tool: Any, folder: Path, reply: Reply = calls_multiply) -> InProcessWorker:
    tool.__doc__, tool.__name__ = multiply.__doc__, "multiply"
    shape = {"chat_template": QWEN3_CHAT_TEMPLATE, "max_completion_length": 256}
    trainer = build_trainer(folder, arguments={"tools": [tool]}, **shape)
    return InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(reply)))


def test_what_no_worker_has_ends_the_run_also_in_a_tool(tmp_path: Path) -> None:
    """TRL makes a text for the model of what a tool raises."""

    def used(a: int, b: int) -> int:
        return int(worker.trl.trainer.optimizer.param_groups[0]["lr"])

    worker = worker_with(used, tmp_path)
    with pytest.raises(RunRefused, match=r"trainer\.optimizer cannot be used"):
        worker.rollouts(jobs_of(chat_rows(1)))


def test_a_tool_that_uses_signals(tmp_path: Path) -> None:
    def signals(a: int, b: int) -> int:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return a * b

    groups: list[Any] = []
    worker = worker_with(signals, tmp_path)
    main_thread.serve_while(lambda: groups.extend(worker.generate(jobs_of(chat_rows(1)))))
    assert groups[0].completions[0][1] == {"role": "tool", "name": "multiply", "content": "12"}


def test_a_rollout_func_that_uses_signals_is_told_the_way_out(tmp_path: Path) -> None:
    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return {}

    worker = InProcessWorker(settings(tmp_path, {"rollout_func": rollout_func})())
    with pytest.raises(UnsupportedError, match=r"signal only works in main thread.*without signals"):
        main_thread.serve_while(lambda: worker.generate(jobs_of(plain_rows(1))))


def test_a_dialogue_ends_where_the_context_of_the_engine_ends(tmp_path: Path) -> None:
    """`vllm_max_model_length` leaves no room for the tool's answer: TRL takes the completion as it is."""

    def reply(prompt: str, index: int) -> str:
        assert "<tool_response>" not in prompt, "the engine would refuse it"
        return calls_multiply(prompt, index)

    worker = worker_with(multiply, tmp_path, reply)
    encode = worker.trl.trainer.processing_class.apply_chat_template
    worker.trl.end_dialogues_before(len(encode(chat_rows(1)[0]["prompt"], tools=[multiply])["input_ids"]) + 120)
    (group,) = worker.rollouts(jobs_of(chat_rows(1)))
    assert [[message["role"] for message in completion] for completion in group.completions] == [["assistant"]] * 2
    assert group.completions[0][0]["tool_calls"]
