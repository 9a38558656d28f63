"""The tokens that truncated sampling kept, from the real vLLM: over them the trainer's log-probabilities are vLLM's.

vLLM's second model runner computes the sets, with a Triton kernel. On a CPU the first one runs: there the test computes
them from the logits that vLLM has cut, and hands them to vLLM's scheduler where the second runner would. The way from
there to our groups is vLLM's own. `test_the_second_model_runner` is the real one, on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import qwen3_1m
import torch
from engines_of_vllm import CLOSE, PROMPTS, change, find_source, finish, logprobs_of, published, rollout_trainer

from async_grpo.engines import Chunk
from async_grpo.engines.vllm import ENVIRONMENT, VLLMEngine
from async_grpo.engines.vllm_sampling import RETURN_KEPT
from async_grpo.errors import UnsupportedError
from async_grpo.rollout.trl_trainer import RolloutTrainer
from async_grpo.tokens import Tokens

TOP_K, TRUNCATED = 9, {"temperature": 0.7, "top_p": 0.8, "top_k": 9, "min_p": 0.02}


def name_kept_tokens_as_the_second_runner_does(engine: VLLMEngine) -> None:
    """Attach the sets to what the first runner returns."""
    from vllm.v1.outputs import SamplingMaskLists

    core = engine._engine.engine_core.engine_core
    core.scheduler.return_sampling_mask = engine._engine.vllm_config.model_config.return_sampling_mask = True
    engine._returns_kept = True
    runner, cut = engine._runner, []

    def note(module: Any, given: Any, result: tuple[Any, torch.Tensor]) -> None:
        cut[:] = [torch.isfinite(row).nonzero()[:, 0].int().numpy() for row in result[1]]

    runner.sampler.topk_topp_sampler.register_forward_hook(note)
    sample_tokens = runner.sample_tokens

    def with_sets(*arguments: Any) -> Any:
        output = sample_tokens(*arguments)
        assert len(cut) == len(output.req_ids), "one token of each request a step"
        offsets = np.cumsum([0, *map(len, cut)])
        output.sampling_masks = SamplingMaskLists(np.concatenate(cut), offsets)
        return output

    runner.sample_tokens = with_sets


@pytest.fixture(scope="module", params=[False, True], ids=["at the end", "token by token"])
def played(request: pytest.FixtureRequest) -> Iterator[tuple[Any, VLLMEngine]]:
    trainer = rollout_trainer(**TRUNCATED)
    engine = VLLMEngine(trainer, seed=0, in_flight_update=request.param)
    name_kept_tokens_as_the_second_runner_does(engine)
    yield trainer, engine
    engine.close()


def sampled(engine: VLLMEngine, own: dict[str, Any] | None = None) -> dict[str, Chunk]:
    """A completion of each prompt, whole."""
    whole: dict[str, Chunk] = {}
    for index, prompt in enumerate(PROMPTS):
        engine.submit(str(index), prompt, seed=None, version=0, own=own)
        whole[str(index)] = Chunk(str(index), Tokens(), False)
    while engine.busy:
        for chunk in engine.step():
            whole[chunk.request_id].tokens.extend(chunk.tokens)
    return whole


def check_sets(trainer: Any, completions: dict[str, Chunk], close: float = CLOSE) -> None:
    """vLLM's log-probabilities are the trainer's over the sets, and these are the likeliest tokens, TOP_K at most."""
    for name, chunk in completions.items():
        prompt, ids, tokens = PROMPTS[int(name)], chunk.tokens.ids, chunk.tokens
        assert all(tokens.kept) and len(tokens.kept) == len(ids) == len(tokens.logprobs)
        device = next(trainer.model.parameters()).device
        with torch.no_grad():
            logits = trainer.model(torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1].cpu()
        for row, token, logprob, raw in zip(logits / 0.7, ids, tokens.logprobs, tokens.kept, strict=True):
            kept = torch.from_numpy(np.frombuffer(raw, np.int32).copy()).long()
            assert token in kept and 1 <= len(kept) <= TOP_K
            assert kept.tolist() == sorted({*kept.tolist()})
            over_kept = torch.log_softmax(row[kept], dim=-1)[(kept == token).nonzero()[0, 0]]
            assert logprob == pytest.approx(float(over_kept), abs=close)
            likeliest = row.topk(len(kept)).values
            torch.testing.assert_close(row[kept].sort(descending=True).values, likeliest, atol=close, rtol=0)


def test_log_probabilities_over_kept_tokens_are_the_trainers(played: tuple[Any, VLLMEngine]) -> None:
    trainer, engine = played
    for version in range(2):
        engine.load(published(trainer), version)
        completions = sampled(engine)
        check_sets(trainer, completions)
        assert len({len(raw) for chunk in completions.values() for raw in chunk.tokens.kept}) > 2, "of several sizes"
        change(trainer, seed=version)


def test_a_greedy_evaluation_is_greedy(played: tuple[Any, VLLMEngine]) -> None:
    trainer, engine = played
    engine.load(published(trainer), version=5)
    check_greedy(trainer, engine)


def check_greedy(trainer: Any, engine: VLLMEngine) -> None:
    for name, chunk in sampled(engine, own={"temperature": 0, "top_p": 1.0, "top_k": 0}).items():
        prompt = torch.tensor([PROMPTS[int(name)]], device=next(trainer.model.parameters()).device)
        greedy = trainer.model.generate(
            prompt, max_new_tokens=len(chunk.tokens), do_sample=False, eos_token_id=trainer.eos_token_ids
        )
        assert chunk.tokens.ids == greedy[0, prompt.shape[1] :].tolist()


def test_vllm_asks_for_top_k_and_so_do_we(played: tuple[Any, VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = played
    with pytest.raises(ValueError, match="--eval-top-k"):
        engine.submit("1", PROMPTS[0], seed=None, version=0, own={"top_k": 0})
    monkeypatch.setattr(engine._sampling, "top_k", 0)
    with pytest.raises(ValueError, match="requires top_k > 0"):
        engine.submit("1", PROMPTS[0], seed=None, version=0)
    assert not engine.busy


def test_the_cpu_build_refuses_with_a_sentence(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UnsupportedError, match=r"It says: .*Model Runner V2.*Its CPU build cannot.*--generator hf"):
        VLLMEngine(rollout_trainer(**TRUNCATED), seed=0, returns_kept=True)


def test_vllm_has_not_moved_what_we_use() -> None:
    from vllm import EngineArgs
    from vllm.config import ModelConfig
    from vllm.outputs import CompletionOutput, SamplingMask
    from vllm.v1.outputs import SamplingMaskLists

    assert EngineArgs.return_sampling_mask is False and ModelConfig.return_sampling_mask is False, RETURN_KEPT
    assert CompletionOutput.sampling_mask is None and SamplingMask([[1]]).token_ids == [[1]]
    lists = SamplingMaskLists(np.array([4, 7, 9], np.int32), np.array([0, 1, 3]))
    assert lists.slice_request(0, 1).to_nested_list() == [[4]]
    assert lists.slice_request(0, 2).to_nested_list() == [[4], [7, 9]]
    runner = find_source("vllm.v1.worker.gpu.sample.sampler")
    assert "SamplingMaskTensors.from_logits(\n                processed_logits," in runner, "sets are of other logits"


@pytest.mark.gpu
def test_the_second_model_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing: CUDA, vLLM's own sets, float32."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    built = qwen3_1m.GRPOConfig
    monkeypatch.setattr(qwen3_1m, "GRPOConfig", lambda **given: built(**{**given, "use_cpu": False}))
    trainer: Any = rollout_trainer(**TRUNCATED, vllm_gpu_memory_utilization=0.2)
    trainer.model.to("cuda")
    engine = VLLMEngine(trainer, seed=0, returns_kept=True)
    try:
        engine.load(published(trainer), version=0)
        check_sets(trainer, sampled(engine), close=5e-3)
        check_greedy(trainer, engine)
    finally:
        engine.close()


# --- A model with a vLLM engine inside, as Unsloth's `fast_inference=True` makes it ------------------------------


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The worker's, with a LoRA adapter and the engine that `load_vllm` of unsloth_zoo would start."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM

    os.environ["TEST_LORA"] = "1"
    made: Any = qwen3_1m.get_trainer()
    del os.environ["TEST_LORA"]
    made.args.temperature = 0.7
    folder: Path = tmp_path_factory.mktemp("model")
    qwen3_1m.build_model(made.processing_class).save_pretrained(folder)
    made.processing_class.save_pretrained(folder)
    made.model.vllm_engine = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=32,
        max_logprobs=0,
        logprobs_mode="processed_logprobs",
        seed=0,
        enable_lora=True,
        max_lora_rank=16,
        max_loras=1,
        enforce_eager=True,
    )
    made.args.use_vllm = made.use_vllm = True
    RolloutTrainer(made)
    made.model.eval()
    yield made
    made.model.vllm_engine.llm_engine.engine_core.shutdown()


def test_the_adapter_of_each_version_is_used(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.lora.request

    request = vllm.lora.request.LoRARequest
    unsloths = lambda lora_name, lora_int_id, lora_path: request(lora_name, lora_int_id, lora_path)  # noqa: E731
    monkeypatch.setattr(vllm.lora.request, "LoRARequest", unsloths)  # which has none of the newer arguments
    engine = VLLMEngine(trainer, seed=1)
    assert (engine.max_num_seqs, engine.versions_at_once) == (32, 1)
    for version in range(3):
        change(trainer, seed=50 + version)
        engine.load(published(trainer), version)
        for index, prompt in enumerate(PROMPTS):
            engine.submit(f"{version}-{index}", prompt, seed=None, version=version)
        outputs = finish(engine)
        for index, prompt in enumerate(PROMPTS):
            ids, logprobs = outputs[f"{version}-{index}"]
            right = logprobs_of(trainer, prompt, ids, 0.7)
            torch.testing.assert_close(torch.tensor(logprobs), right, atol=CLOSE, rtol=0)
        assert len(engine._engine.list_loras()) == 1


def test_two_workers_do_not_draw_the_same(trainer: Any) -> None:
    """Unsloth's engines all start with the same seed."""

    def draw(seed: int) -> list[list[int]]:
        engine = VLLMEngine(trainer, seed=seed)
        engine.load(published(trainer), version=seed)
        for index, prompt in enumerate(PROMPTS):
            engine.submit(f"{seed}-{index}", prompt, seed=None, version=seed)
        return [ids for _, (ids, _) in sorted(finish(engine).items())]

    first = draw(101)
    assert draw(101) == first
    assert draw(102) != first


def test_another_base_is_refused(trainer: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in published(trainer).items()}
    weights["base_model.model.model.norm.weight"] += 0.5
    with pytest.raises(UnsupportedError, match=r"norm\.weight.*fast_inference=False"):
        VLLMEngine(trainer, seed=0).load(weights, version=9)
