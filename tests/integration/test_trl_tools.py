"""TRL's tools, environments and `rollout_func`, with the same result in a worker."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOTrainer

from async_grpo.errors import RunRefused, UnsupportedError
from async_grpo.rollout.threads import main_thread
from kit.compared_with_trl import assert_same_counts, plain_scripted, scripted, settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of, training_logs
from kit.scripted import ScriptedEngine, ScriptedGenerator
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_tokenizer, chat_rows, length, plain_rows
from kit.tools import TOOL_CALL, counts_tool_results, multiply, says_twelve

pytestmark = pytest.mark.integration


BAD_CALL = '<tool_call>\n{"name": "divide", "arguments": {}}\n</tool_call>'
TOOL_RESULT = "\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def calls_multiply(prompt: str, index: int) -> str:
    """Calls the tool in every second completion, and uses its result."""
    if "<tool_response>" in prompt:
        return "twelve"
    return f"let me see{TOOL_CALL}" if index % 2 == 0 else "eleven"


@pytest.mark.parametrize("is_async", [False, True])
def test_tools_read_the_step_and_add_to_the_metrics_as_in_trl(is_async: bool, tmp_path: Path) -> None:
    held: list[GRPOTrainer] = []
    seen: list[int] = []

    def note() -> None:
        seen.append(held[-1].state.global_step)
        held[-1]._metrics["train"]["products"].append(12.0 + held[-1].state.global_step)

    def counted(a: int, b: int) -> int:
        note()
        return a * b

    async def counted_later(a: int, b: int) -> int:
        note()
        return a * b

    counted.__doc__ = counted_later.__doc__ = multiply.__doc__
    tool = counted_later if is_async else counted
    tool.__name__ = "multiply"

    def get_trainer(**more: Any) -> GRPOTrainer:
        build = settings(tmp_path, {"tools": [tool]}, chat_template=QWEN3_CHAT_TEMPLATE, reward_funcs=says_twelve)
        held.append(build(max_completion_length=256, max_steps=3, **more))
        return held[-1]

    run = scripted(get_trainer, calls_multiply)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_multiply)))
    assert seen == [step for step in range(3) for _ in range(4)] * 2
    assert [entry["products"] for entry in run.logs] == [12.0, 13.0, 14.0]


def test_what_no_worker_has_ends_the_run_also_in_a_tool(tmp_path: Path) -> None:
    """TRL makes a text for the model of what a tool raises."""
    held: list[Any] = []

    def used(a: int, b: int) -> int:
        return int(held[-1].optimizer.param_groups[0]["lr"])

    used.__doc__, used.__name__ = multiply.__doc__, "multiply"

    def get_trainer(**more: Any) -> GRPOTrainer:
        build = settings(tmp_path, {"tools": [used]}, chat_template=QWEN3_CHAT_TEMPLATE, reward_funcs=says_twelve)
        held.append(build(max_completion_length=256, **more))
        return held[-1]

    with pytest.raises(RunRefused, match=r"trainer\.optimizer cannot be used"):
        scripted(get_trainer, calls_multiply)


def test_tools(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"tools": [multiply]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[says_twelve, counts_tool_results],
        max_completion_length=256,
    )
    run = scripted(get_trainer, calls_multiply)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_multiply)))
    assert run.logs[0]["tools/call_frequency"] == 0.5
    assert run.logs[0]["tools/failure_frequency"] == 0
    assert run.logs[0]["rewards/says_twelve/mean"] == 0.5
    assert run.trainer.tools == [multiply], "the trainer needs them again for evaluation"

    tokenizer = run.trainer.processing_class
    inputs = run.inputs[0]
    for ids, mask, tool_mask in zip(
        inputs["completion_ids"], inputs["completion_mask"], inputs["tool_mask"], strict=True
    ):
        model_wrote = tokenizer.decode(ids[(mask * tool_mask).bool()])
        tool_wrote = tokenizer.decode(ids[(mask * (1 - tool_mask)).bool()])
        if tool_wrote:
            assert tool_wrote == TOOL_RESULT
            assert model_wrote == f"let me see{TOOL_CALL}<|im_end|>twelve<|im_end|>"
        else:
            assert model_wrote == "eleven<|im_end|>"
    called = run.groups[0].completions[0]
    assert [message["role"] for message in called] == ["assistant", "tool", "assistant"]
    assert called[1] == {"role": "tool", "name": "multiply", "content": "12"}


def test_a_tool_that_uses_signals(tmp_path: Path) -> None:
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first.
            b: The second.
        """
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))
        return a * b

    trainer = settings(tmp_path, {"tools": [multiply]}, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=256)()
    worker = InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(calls_multiply)))
    groups: list[Any] = []
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
    trainer = settings(tmp_path, {"tools": [multiply]}, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=256)()
    tokenizer = build_tokenizer(QWEN3_CHAT_TEMPLATE)
    prompt_tokens = len(tokenizer.apply_chat_template(chat_rows(1)[0]["prompt"], tools=[multiply])["input_ids"])

    def reply(prompt: str, index: int) -> str:
        assert "<tool_response>" not in prompt, "the engine would refuse it"
        return calls_multiply(prompt, index)

    worker = InProcessWorker(trainer, ScriptedEngine(ScriptedGenerator(reply)))
    worker.trl.end_dialogues_before(prompt_tokens + 120)
    (group,) = worker.rollouts(jobs_of(chat_rows(1)))
    assert [[message["role"] for message in completion] for completion in group.completions] == [["assistant"]] * 2
    assert group.completions[0][0]["tool_calls"]


def test_failing_tool_calls_are_counted(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"tools": [multiply]},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        max_completion_length=256,
    )

    def calls_divide(prompt: str, index: int) -> str:
        return "sorry" if "<tool_response>" in prompt else (BAD_CALL if index % 4 == 0 else "no")

    run = scripted(get_trainer, calls_divide)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, calls_divide)))
    assert run.logs[0]["tools/call_frequency"] == 0.25
    assert run.logs[0]["tools/failure_frequency"] == 1


class Counting:
    """An environment: adds up what the model tells it to."""

    made = 0

    def __init__(self) -> None:
        Counting.made += 1

    def reset(self, **row: Any) -> str:
        self.total = 0
        self.target = row.get("target", 5)
        return f" Reach {self.target}."

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: How much.

        Returns:
            The new total.
        """
        self.total += number
        return self.total

    def get_reward(self) -> float:
        return -float(abs(self.total - self.target))


def adds_three(prompt: str, index: int) -> str:
    if "<tool_response>" in prompt:
        return "done"
    assert " Reach " in prompt, "the observation of reset() must be in the prompt"
    return '<tool_call>\n{"name": "add", "arguments": {"number": 3}}\n</tool_call>' if index % 2 else "nothing"


@pytest.mark.parametrize("with_eval", [False, True], ids=["training", "training and evaluation"])
def test_an_environment(with_eval: bool, tmp_path: Path) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2} if with_eval else {}
    get_trainer = settings(
        tmp_path,
        {"environment_factory": Counting, **({"eval_dataset": chat_rows(2)} if with_eval else {})},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        train_dataset=chat_rows(),
        max_completion_length=200,
        **evaluation,
    )
    run = scripted(get_trainer, adds_three)
    if not with_eval:  # the plain trainer would evaluate with its script
        assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, adds_three)))
    for group in run.groups:
        target = group.job.row["target"]
        assert group.rewards[:, 1].tolist() == [-target, -abs(3 - target)]
    assert run.logs[0]["rewards/Counting/mean"] < 0
    assert run.trainer.environment_factories is not None
    assert len([entry for entry in run.trainer.state.log_history if "eval_reward" in entry]) == 2 * with_eval


def test_environments_that_bring_their_own_prompts(tmp_path: Path) -> None:
    get_trainer = settings(
        tmp_path,
        {"environment_factory": {"count": Counting}},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        train_dataset=Dataset.from_list([{"environment": "count", "target": n} for n in range(8)]),
        max_completion_length=200,
    )
    run = scripted(get_trainer, adds_three)
    assert_same_counts(run.logs, training_logs(plain_scripted(get_trainer, adds_three)))


def test_a_rollout_func_of_the_user_runs_in_the_worker(tmp_path: Path) -> None:
    calls: list[Any] = []

    def rollout_func(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        calls.append(trainer)
        ids = trainer.processing_class([f"{index % 2}xy" for index in range(len(prompts))])["input_ids"]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(row) for row in ids],
            "env_mask": [[1, 0, 1] for _ in ids],
            "score": [float(index % 2) for index in range(len(prompts))],
        }

    def given(completions: list[str], score: list[float], **_: Any) -> list[float]:
        return score

    run = InProcessRun(settings(tmp_path, {"rollout_func": rollout_func}, reward_funcs=given)).train()
    assert calls == [run.worker] * 2
    assert run.groups[0].rewards[:, 0].tolist() == [0, 1]
    assert run.inputs[0]["tool_mask"].tolist() == [[1, 0, 1]] * 8
    assert run.inputs[0]["old_per_token_logps"].tolist() == [[-1, 0, -1]] * 8
