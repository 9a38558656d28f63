"""Dialogues of several turns: TRL's own result, whatever the tools do, and the loss sees no tool's token."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from async_grpo.engines import PreparedGroup, SampledGroup
from async_grpo.errors import RunRefused, UnsupportedError
from async_grpo.rollout.threads import main_thread
from kit.compared_with_trl import Reply, calls_multiply, settings
from kit.groups import values_of
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.scripted import NewWeightsEachTurn, ScriptedEngine, ScriptedGenerator, Streaming, kept, writing
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, length, plain_rows
from kit.tools import Adder, double, multiply, written
from kit.waiting import DEADLINE_S


def breaks(text: str) -> str:
    """Raise.

    Args:
        text: of the error.
    """
    raise RuntimeError(text)


def essay(length: int) -> str:
    """Write a text.

    Args:
        length: of the text.
    """
    return "x" * length


async def slowly(number: int) -> int:
    """Add one.

    Args:
        number: the number.
    """
    return number + 1


SCRIPT: list[list[str]] = [  # by the completion's index in the batch, what it writes turn by turn
    ["no tool at all"],
    [written(("double", {"number": 2})), written(("double", {"number": 4})), "eight"],
    [written(("slowly", {"number": 1}), ("double", {"number": 3}), ("slowly", {"number": 5})), "many"],
    [written(("breaks", {"text": "broken"})), "so it is"],
    [written(("absent", {})), written(("double", {"wrong": 1})), written(("slowly", {"wrong": 1})), "over"],
    [written(("essay", {"length": 500}))],
    ["<tool_call>\n{not json", "never"],
    [written(("double", {"number": 1}))] * 6,
]
TOOLS = [double, breaks, essay, slowly]


def reply(prompt: str, index: int) -> str:
    """What comes next in the dialogue of this prompt; its first turn says which it is."""
    said = prompt.split("<|im_start|>assistant\n")[1:]
    if not said[0]:
        return f"{index}#{SCRIPT[index][0]}"
    script = SCRIPT[int(said[0][0])]
    return script[min(len(said) - 1, len(script) - 1)]


def dialogues(tmp_path: Path, **changes: Any) -> Any:
    return settings(
        tmp_path,
        {"tools": TOOLS},
        chat_template=QWEN3_CHAT_TEMPLATE,
        reward_funcs=[length],
        max_completion_length=420,
        max_tool_calling_iterations=3,
        max_steps=1,
        shuffle_dataset=False,
        **changes,
    )


def test_dialogues_are_as_in_plain_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several turns, several calls in a message, async ones, failing ones, a result too long, and the limit."""
    get_trainer = dialogues(tmp_path)
    worker = InProcessWorker(get_trainer(), ScriptedEngine(ScriptedGenerator(reply)))
    rows = list(chat_rows(4))
    with monkeypatch.context() as patched:
        read = Mock(wraps=grpo_trainer.parse_response)
        patched.setattr(grpo_trainer, "parse_response", read)
        groups = worker.rollouts(jobs_of(rows))

    plain: Any = get_trainer(trainer_class=writing(reply))
    prompts = [row["prompt"] for row in rows for _ in range(2)]
    plain._sync_tool_dicts = [{tool.__name__: tool for tool in TOOLS if tool is not slowly}] * 8
    plain._async_tool_dicts = [{"slowly": slowly}] * 8
    _, completion_ids, masks, completions, logprobs, *_ = plain._generate(prompts)

    assert [message for group in groups for message in group.completions] == completions
    assert values_of(groups, "completion_ids") == [*chain.from_iterable(completion_ids)]
    assert values_of(groups, "tool_mask") == [*chain.from_iterable(masks)]
    assert values_of(groups, "sampling_logprobs") == [*chain.from_iterable(logprobs)]
    counted = plain._metrics["train"]
    calls = [group.metrics["tools/call_frequency"][0] for group in groups]
    failures = [group.metrics["tools/failure_frequency"][0] for group in groups]
    assert sum(calls) / 4 == pytest.approx(counted["tools/call_frequency"][0])
    total = sum(calls)
    share = sum(call * failed for call, failed in zip(calls, failures, strict=True)) / total
    assert share == pytest.approx(counted["tools/failure_frequency"][0])
    written = [message for completion in completions for message in completion if message["role"] == "assistant"]
    assert read.call_count == len(written), "each message is read once"
    assert len(completions[1]) == 5, "three turns"
    assert [message["content"] for message in completions[2][1:4]] == ["6", "2", "6"]
    assert len(completions[5]) == 1, "the result was longer than the completion may be"
    assert sum(message["role"] == "assistant" for message in completions[7]) == 4, "the limit of tool calls"


def test_a_slow_tool_holds_up_no_other_group(tmp_path: Path) -> None:
    others_ended = threading.Event()

    def waits(number: int) -> int:
        """Wait for the other groups.

        Args:
            number: any.
        """
        assert others_ended.wait(120), "the other groups wait for this tool"
        return number

    def slow(prompt: str, index: int) -> str:
        if "<tool_response>" in prompt:
            return "done"
        return written(("waits" if "\na<|im_end|>" in prompt else "double", {"number": 1}))

    get = settings(tmp_path, {"tools": [waits, double]}, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=400)
    worker = InProcessWorker(get(), Streaming(ScriptedGenerator(slow)))
    assert [outcome.job.seq for outcome in worker.ended(2, jobs_of(chat_rows(3)))] == [1, 2]
    others_ended.set()
    [last] = worker.ended(1)
    assert last.error is None


def test_the_model_reads_what_a_tool_wrote_and_the_loss_does_not(tmp_path: Path) -> None:
    run = InProcessRun(dialogues(tmp_path), engine=ScriptedEngine(ScriptedGenerator(reply))).train()
    trainer, inputs = run.trainer, run.inputs[0]
    row = next(index for index, mask in enumerate(inputs["tool_mask"]) if not bool(mask.all()))
    tool_tokens = inputs["completion_mask"][row].bool() & ~inputs["tool_mask"][row].bool()
    position = int(tool_tokens.nonzero()[0])
    changed = {**inputs, "completion_ids": inputs["completion_ids"].clone()}
    changed["completion_ids"][row, position] = (changed["completion_ids"][row, position] + 1) % 90

    before, after = (logprobs_of(trainer, batch)[row] for batch in (inputs, changed))
    written_later = inputs["completion_mask"][row].bool() & (torch.arange(len(before)) > position)
    assert torch.equal(before[:position], after[:position])
    assert not torch.allclose(before[written_later], after[written_later])

    gradients: list[torch.Tensor] = []
    logps = trainer._get_per_token_logps_and_entropies

    def watched(*args: Any, **kwargs: Any) -> Any:
        values, *rest = logps(*args, **kwargs)
        values.register_hook(gradients.append)
        return values, *rest

    trainer._get_per_token_logps_and_entropies = watched
    inputs["advantages"] = torch.ones_like(inputs["advantages"])
    trainer.compute_loss(trainer.model, inputs).backward()
    (gradient,) = gradients
    assert bool((gradient[row][tool_tokens] == 0).all())
    assert bool((gradient[row][(inputs["tool_mask"][row] * inputs["completion_mask"][row]).bool()] != 0).any())


def logprobs_of(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    with torch.no_grad():
        return trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, mask, logits_to_keep=batch["completion_ids"].shape[1]
        )[0]


# --- Dialogues that end badly: on an engine in lockstep, and on one that can be joined ---------------------------


engines = pytest.mark.parametrize("engine_of", [ScriptedEngine, Streaming], ids=["lockstep", "streaming"])


class Waiting:
    """An environment whose tool waits until the test lets it go on."""

    goes_on = threading.Event()
    made = 0

    def __init__(self) -> None:
        Waiting.made += 1

    def reset(self, **row: Any) -> None: ...

    def waits(self) -> str:
        """Wait."""
        assert self.goes_on.wait(DEADLINE_S)
        return "done"


def calls(prompt: str, index: int) -> str:
    return "done" if "<tool_response>" in prompt else written(("double", {"number": 3}))


def worker_of(tmp_path: Path, engine_of: Any, reply: Any = calls, **given: Any) -> InProcessWorker:
    rest = {"train_dataset": chat_rows(), "arguments": given or {"tools": [double]}, "reward_funcs": [length]}
    trainer = build_trainer(tmp_path, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=300, **rest)
    return InProcessWorker(trainer, engine_of(ScriptedGenerator(reply)))


@engines
def test_an_error_costs_its_group_alone(engine_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a template cannot render what a tool returned."""
    worker = worker_of(tmp_path, engine_of)
    jobs = jobs_of(chat_rows(3))
    turns: Any = worker.calls
    run = turns._tools.run

    async def spoilt(noted: Any, owner: Any) -> Any:
        outcomes = await run(noted, owner)
        if spoil.pop("once", False):
            raise ValueError("the template broke")
        return outcomes

    spoil = {"once": True}
    monkeypatch.setattr(turns._tools, "run", spoilt)
    [failed] = [outcome for outcome in worker.ended(3, jobs) if outcome.error is not None]
    assert "the template broke" in str(failed.error)
    [again] = worker.ended(1, [failed.job])
    assert again.error is None
    assert turns._asks._working == 0


@engines
def test_what_is_dropped_between_two_turns_is_begun_again(engine_of: Any, tmp_path: Path) -> None:
    """As when the weights were lost: the worker closes its engine, and its jobs are claimed again."""
    Waiting.goes_on.clear()

    def asks(prompt: str, index: int) -> str:
        return "well" if "<tool_response>" in prompt else written(("waits", {}))

    worker = worker_of(tmp_path, engine_of, asks, environment_factory=Waiting)
    turns: Any = worker.calls
    before = Waiting.made
    worker.calls.start(jobs_of(chat_rows(1)), 0)
    deadline = time.monotonic() + DEADLINE_S
    while not turns._tools.in_time:
        assert time.monotonic() < deadline
        assert worker.calls.step() == []
    worker.calls.close()
    assert turns._asks._working == 0
    Waiting.goes_on.set()
    (group,) = worker.rollouts(jobs_of(chat_rows(1)))
    assert [completion[1]["content"] for completion in group.completions] == ["done"] * 2
    assert Waiting.made > before, "an environment that a tool may still use is not used again"


# --- Several groups in flight on one engine, which the test plays ------------------------------------------------


GROUPS = 3


CALLS = {"tools": written(("multiply", {"a": 3, "b": 4})), "environments": written(("add", {"number": 3}))}
GIVEN = {"tools": {"tools": [multiply]}, "environments": {"environment_factory": Adder}}


class Together(NewWeightsEachTurn):
    """Answers nothing until the first turns of all dialogues are there."""

    def __init__(self, script: ScriptedGenerator) -> None:
        super().__init__(script)
        self._missing, self._waiting = 2 * GROUPS, []

    def sample(self, new: Sequence[PreparedGroup]) -> list[SampledGroup]:
        self._missing -= len(new)
        self._waiting += new
        if self._missing > 0:
            return []
        waiting, self._waiting = self._waiting, []
        return super().sample(waiting)


@pytest.mark.parametrize("kind", ["tools", "environments"])
def test_groups_with_tools_are_in_flight_together(kind: str, tmp_path: Path) -> None:
    def reply(prompt: str, index: int) -> str:
        return "done" if "<tool_response>" in prompt else [CALLS[kind], "no tool"][index]

    worker = worker_of(tmp_path, Together, reply, **GIVEN[kind])
    for group in worker.generate(jobs_of(chat_rows(GROUPS)), version=4):
        roles = [[message["role"] for message in completion] for completion in group.completions]
        assert roles == [["assistant", "tool", "assistant"], ["assistant"]]
        assert group.completions[0][1]["content"] == ("12" if kind == "tools" else "3")
        for tokens in group.tokens:
            assert len(tokens.versions) == len(tokens)
            own = zip(tokens.ids, tokens.mask, strict=True)
            assert tokens.kept == [kept(token) if mask else b"" for token, mask in own]
        assert group.tokens[0].versions[-1] == 5, "the last turn was sampled by newer weights"
        assert set(group.tokens[1].versions) == {4}
        assert group.version == 4
        rewards = worker.trl.score([group])[0].rewards
        if kind == "environments":
            assert rewards[:, 1].tolist() == [3.0, 0.0], "each group's rewards are of its own environments"


# --- Tools and a rollout_func in a worker ------------------------------------------------------------------------


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
    with pytest.raises(RunRefused):
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
