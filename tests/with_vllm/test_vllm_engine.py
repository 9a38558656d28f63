"""The real vLLM against transformers on the same weights: tokens, log-probabilities, new weights, adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from engines_of_vllm import CLOSE, PROMPTS, change, collect, finish, logprobs_of, published, rollout_trainer, started
from trl import GRPOTrainer

from async_grpo.engines import vllm_hooks
from async_grpo.engines.vllm import VLLMEngine

Running = tuple[GRPOTrainer, VLLMEngine]


@pytest.fixture(scope="module")
def greedy() -> Iterator[Running]:
    yield from started(rollout_trainer(generation_kwargs={"do_sample": False}))


@pytest.fixture(scope="module")
def sampling() -> Iterator[Running]:
    yield from started(rollout_trainer(temperature=0.7), in_flight_update=True)


@pytest.fixture(scope="module")
def adapter() -> Iterator[Running]:
    os.environ["TEST_LORA"] = "1"
    trainer = rollout_trainer(temperature=1.0)
    del os.environ["TEST_LORA"]
    yield from started(trainer)


def run(engine: VLLMEngine, prompts: dict[str, list[int]], version: int) -> dict[str, tuple[list[int], list[float]]]:
    for name, prompt in prompts.items():
        engine.submit(name, prompt, seed=None, version=version)
    return finish(engine)


def named(prefix: str) -> dict[str, list[int]]:
    return {f"{prefix}-{index}": prompt for index, prompt in enumerate(PROMPTS)}


def check_greedy(trainer: GRPOTrainer, engine: VLLMEngine, version: int) -> None:
    outputs = run(engine, named(f"v{version}"), version)
    for name, prompt in named(f"v{version}").items():
        expected = trainer.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=trainer.max_completion_length,
            do_sample=False,
            eos_token_id=trainer.eos_token_ids,
            pad_token_id=39,
        )
        assert outputs[name][0] == expected[0, len(prompt) :].tolist()


def test_greedy_tokens_are_those_of_transformers_through_three_updates(greedy: Running) -> None:
    trainer, engine = greedy
    seen = set()
    for version in range(4):
        engine.load(published(trainer), version)
        check_greedy(trainer, engine, version)
        seen.add(str(run(engine, {"again": PROMPTS[0]}, version)))
        change(trainer, seed=version)
    assert len(seen) > 1, "the updates changed nothing"
    assert engine._copies is not None, "vLLM does more than to copy: updates are slower than they were"


def test_weights_that_vllm_processes_on_loading_are_reloaded(greedy: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine = greedy
    assert engine._in_place, "a plain model is written in place"
    monkeypatch.setattr(engine, "_in_place", False)
    change(trainer, seed=9)
    engine.load(published(trainer), version=9)
    check_greedy(trainer, engine, version=9)


def test_a_prompt_that_is_too_long_is_refused(greedy: Running) -> None:
    with pytest.raises(ValueError, match=r"(?i)long|length|maximum"):
        greedy[1].submit("long", [1] * 600, seed=None, version=0)
    assert not greedy[1].busy


def test_the_second_turn_of_a_dialogue_finds_the_first_in_the_cache(greedy: Running) -> None:
    _, engine = greedy
    first = [3 + index % 30 for index in range(70)]
    run(engine, {"first turn": first}, version=0)
    engine.submit("second turn", [*first, 5, 6], seed=None, version=0)
    ended: list[Any] = []
    while engine.busy:
        ended += engine._engine.step()
    assert ended[-1].num_cached_tokens == 64


def test_log_probabilities_are_the_trainers_at_each_version_in_flight(sampling: Running) -> None:
    """Weights change twice while the completions are sampled; each token is the version's that sampled it."""
    trainer, engine = sampling
    engine.load(published(trainer), version=0)
    for name, prompt in named("flight").items():
        engine.submit(name, prompt, seed=None, version=0)
    outputs: dict[str, tuple[list[int], list[float]]] = {}
    expected: dict[str, list[float]] = {name: [] for name in named("flight")}

    def catch_up() -> None:
        for name, prompt in named("flight").items():
            ids = outputs[name][0]
            if len(ids) > len(expected[name]):
                expected[name] += logprobs_of(trainer, prompt, ids, 0.7)[len(expected[name]) :].tolist()

    for version in (1, 2):
        for _ in range(4):
            collect(outputs, engine.step())
        catch_up()
        change(trainer, seed=20 + version)
        engine.load(published(trainer), version)
    while engine.busy:
        collect(outputs, engine.step())
    catch_up()
    assert max(len(ids) for ids, _ in outputs.values()) > 8, "no completion saw the last version"
    for name, (_, logprobs) in outputs.items():
        torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected[name]), atol=CLOSE, rtol=0)


def test_adapters_of_two_versions_are_used_side_by_side(adapter: Running) -> None:
    trainer, engine = adapter
    assert engine.versions_at_once == 2
    weights: dict[int, dict[str, torch.Tensor]] = {}
    for version in range(4):
        change(trainer, seed=30 + version)
        weights[version] = {name: tensor.clone() for name, tensor in published(trainer).items()}
        older = [version - 1] if version else []
        for old in older:
            engine.submit(f"old-{version}", PROMPTS[3], seed=None, version=old)
        engine.load(published(trainer), version, in_use=older)
        engine.submit(f"new-{version}", PROMPTS[3], seed=None, version=version)
        outputs = finish(engine)
        for name, used in ((f"new-{version}", version), *((f"old-{version}", old) for old in older)):
            trainer.model.load_state_dict(weights[used], strict=False)
            ids, logprobs = outputs[name]
            right = logprobs_of(trainer, PROMPTS[3], ids, 1.0)
            torch.testing.assert_close(torch.tensor(logprobs), right, atol=CLOSE, rtol=0)
        trainer.model.load_state_dict(weights[version], strict=False)
    assert len(engine._engine.list_loras()) == 2, "adapters that nothing uses are unloaded"


def test_every_private_name_is_where_it_was(greedy: Running, adapter: Running) -> None:
    from importlib import import_module

    live = {
        "LLMEngine.model_executor": greedy[1]._engine.model_executor,
        "LLMEngine.renderer": greedy[1]._engine.renderer,
        "WorkerWrapperBase.worker": greedy[1]._engine.model_executor.driver_worker.worker,
        "Worker.model_runner": greedy[1]._engine.model_executor.driver_worker.worker.model_runner,
    }
    for hook in vllm_hooks.HOOKS:
        owner, _, name = hook.rpartition(".")
        if any(hook.endswith(ending) for ending in live):
            continue  # set in a constructor: the attributes above were found
        module, _, class_name = owner.rpartition(".")
        holder = getattr(import_module(module), class_name) if class_name[0].isupper() else import_module(owner)
        assert hasattr(holder, name), f"vLLM: {hook} is gone. async_grpo.engines.vllm_hooks must follow."
    assert adapter[1]._runner.lora_manager is not None


def test_vllm_has_not_moved_what_we_use_of_its_second_model_runner() -> None:
    """The one that CUDA gets. It may not be imported on a CPU, so its source is read."""
    from engines_of_vllm import find_source

    package = find_spec("vllm.v1.worker.gpu")
    assert package is not None and package.origin is not None
    folder = Path(package.origin).parent
    runner = (folder / "model_runner.py").read_text()
    adapters = (folder.parent / "lora_model_runner_mixin.py").read_text()
    assert "class GPUModelRunner(LoRAModelRunnerMixin)" in runner
    for name in vllm_hooks.OF_A_RUNNER:
        assert f"    def {name}(" in runner + adapters, f"vLLM: {name} of {vllm_hooks.V2_RUNNER} is gone"
    assert "self.lora_manager = " in adapters
    assert vllm_hooks.SWITCH in find_source("vllm.envs")
