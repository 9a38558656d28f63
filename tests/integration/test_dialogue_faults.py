"""Dialogues that end badly, and what becomes of the others: on an engine in lockstep, and on one that can be joined."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kit.in_process import InProcessWorker, jobs_of
from kit.scripted import ScriptedEngine, ScriptedGenerator, Streaming
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, length
from kit.tools import double, written
from kit.waiting import DEADLINE_S

pytestmark = pytest.mark.integration
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
    trainer = build_trainer(
        tmp_path,
        chat_template=QWEN3_CHAT_TEMPLATE,
        train_dataset=chat_rows(),
        arguments=given or {"tools": [double]},
        reward_funcs=[length],
        max_completion_length=300,
    )
    return InProcessWorker(trainer, engine_of(ScriptedGenerator(reply)))


@engines
def test_an_error_in_a_dialogue_costs_its_group_alone(
    engine_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
