"""Dialogues of several turns: TRL's own result, whatever the tools do, and the loss sees no tool's token."""

from __future__ import annotations

import threading
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from trl.trainer import grpo_trainer

from kit.compared_with_trl import settings
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator, Streaming, writing
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, chat_rows, length
from kit.tools import double, written

pytestmark = pytest.mark.integration


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
    script = ScriptedEngine(ScriptedGenerator(reply))
    worker = InProcessWorker(get_trainer(), script)
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
    assert [token for group in groups for token in group.completion_ids.tolist()] == [
        *chain.from_iterable(completion_ids)
    ]
    assert [mask for group in groups for mask in group.tool_mask.tolist()] == [*chain.from_iterable(masks)]  # type: ignore[union-attr]
    assert [value for group in groups for value in group.sampling_logprobs.tolist()] == [*chain.from_iterable(logprobs)]
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

    get_trainer = settings(
        tmp_path, {"tools": [waits, double]}, chat_template=QWEN3_CHAT_TEMPLATE, max_completion_length=400
    )
    worker = InProcessWorker(get_trainer(), Streaming(ScriptedGenerator(slow)))
    assert [outcome.job.seq for outcome in worker.ended(2, jobs_of(chat_rows(3)))] == [1, 2]
    others_ended.set()
    [last] = worker.ended(1)
    assert last.error is None


def test_the_model_reads_what_a_tool_wrote_and_the_loss_does_not(tmp_path: Path) -> None:
    get_trainer = dialogues(tmp_path)
    run = InProcessRun(get_trainer, engine=ScriptedEngine(ScriptedGenerator(reply)))
    run.train()
    trainer, inputs = run.trainer, run.inputs[0]
    row = next(index for index, mask in enumerate(inputs["tool_mask"]) if not bool(mask.all()))
    tool_tokens = (inputs["tool_mask"][row] * inputs["completion_mask"][row] == 0) & inputs["completion_mask"][
        row
    ].bool()
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
