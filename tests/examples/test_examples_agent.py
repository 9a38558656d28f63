"""The example of an agent that asks the worker's endpoint with the real `openai` client."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from async_grpo.envs import Endpoint, OpenAIHarness
from async_grpo.setup.setup_file import load_trainer
from kit.in_process import InProcessRun, InProcessWorker, jobs_of
from kit.runs import ROOT, command, ran, steps_logged
from kit.scripted import ScriptedGenerator, Streaming
from kit.tiny_trainer import QWEN3_CHAT_TEMPLATE, build_trainer, chat_rows, length
from kit.tools import written

openai = pytest.importorskip("openai", reason="the extra `agents` is not installed")
pytestmark = pytest.mark.integration
EXAMPLE = ROOT / "examples" / "openai_agent" / "my_trainer.py"
STEPS = 40


def test_the_example_trains_on_what_a_worker_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_trainer() -> Any:
        small = {"per_device_train_batch_size": "4"}  # one group: a client takes longer to make than its answers
        trainer = load_trainer(EXAMPLE, engine_here=False, steps=2, config_values=small)
        for name in ("agent", "tiny_model"):
            monkeypatch.delitem(sys.modules, name)
        return trainer

    monkeypatch.chdir(tmp_path)
    run = InProcessRun(get_trainer).train()
    assert [log["step"] for log in run.logs] == [1, 2]
    assert {group.metrics["agent/turns"][0] for group in run.groups} == {2.0}
    assert [log["agent/failure_frequency"] for log in run.logs] == [0.0, 0.0]
    for group in run.groups:
        assert group.tool_mask is not None and 0 < group.tool_mask.sum() < len(group.tool_mask)
        assert 0 < group.rewards.mean() < 1


def test_what_the_clients_make_of_answers_and_refusals(tmp_path: Path) -> None:
    """Asynchronous and not, streamed and not, with tools; each refusal is the client's own error, asked once."""
    seen: list[Any] = []

    async def agent(prompt: list[Any], endpoint: Endpoint) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            ask = client.chat.completions.create
            tool = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}
            answer = await ask(model=endpoint.model, messages=prompt, tools=[tool], logprobs=True)
            said = answer.choices[0].message
            [call] = said.tool_calls
            result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
            messages = [*prompt, said.model_dump(exclude_none=True), result]
            stream = await ask(model=endpoint.model, messages=messages, tools=[tool], stream=True)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            seen.append((call.function.name, len(answer.choices[0].logprobs.content), "".join(parts)))
        with openai.OpenAI(base_url=endpoint.base_url, api_key="another") as client:
            with pytest.raises(openai.AuthenticationError, match="no episode that is open"):
                client.chat.completions.create(model=endpoint.model, messages=prompt)
        with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            with pytest.raises(openai.NotFoundError, match="one model"):
                client.chat.completions.create(model="gpt-5", messages=prompt)

    call = written(("double", {"number": 21}))
    given = {"train_dataset": chat_rows(), "reward_funcs": [length], "max_completion_length": 300}
    harness = {"rollout_func": OpenAIHarness(agent)}
    trainer = build_trainer(tmp_path, chat_template=QWEN3_CHAT_TEMPLATE, arguments=harness, **given)
    reply = ScriptedGenerator(lambda prompt, index: "42" if "<tool_response>" in prompt else call)
    worker = InProcessWorker(trainer, Streaming(reply))
    with pytest.raises(Exception, match="one model, 'policy'"):
        worker.generate(jobs_of(chat_rows(1)))
    assert seen[0] == ("double", len(call) + 1, "42")


@pytest.mark.slow
def test_the_example_trains_with_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "worker"
    options = ("-n", "2", "--generator", "hf", "--steps", str(STEPS), "--eval-every", "0")
    with command("train", str(EXAMPLE), *options, cwd=tmp_path) as run:
        run.wait_until(lambda: len(steps_logged(run_dir)) >= 3, "three steps")
        killed = run.worker(1)
        assert killed is not None
        killed.kill()
        run.wait_until(lambda: (again := run.worker(1)) is not None and again.pid != killed.pid, "another worker 1")
        assert run.wait() == 0, run.output
    assert steps_logged(run_dir) == list(range(1, STEPS + 1))
    assert "WARNING" not in "".join(line for line in run.output.splitlines() if "endpoint" in line)
    assert "OK: all" in ran("audit", str(run_dir), cwd=tmp_path)
