"""The sampler's CUDA graphs and its kernels against the loop without them. They have not run yet (docs/gpu.md)."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from on_device import DEVICE, ON_CPU, need_device
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from async_grpo.engines import captured
from async_grpo.engines.captured import DecodeSteps
from async_grpo.engines.drawing import drawn_on
from async_grpo.engines.transformers import TransformersEngine
from kit.engines import sample

pytestmark = pytest.mark.gpu
PROMPTS = [list(range(first, first + 5 + first % 15)) for first in range(3, 35)]  # a tie is in one row only


@pytest.fixture(scope="module")
def model() -> Any:
    need_device()
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = Qwen3Config(
        vocab_size=4096, num_key_value_heads=2, head_dim=64, max_position_embeddings=512, initializer_range=0.1, **shape
    )
    return Qwen3ForCausalLM(config).to(DEVICE).eval()


def engine_of(model: Any, *, fast: bool, autocast: Any = nullcontext, **sampling: Any) -> TransformersEngine:
    return TransformersEngine(
        model,
        config=GenerationConfig(max_new_tokens=20 if ON_CPU else 90, pad_token_id=0, eos_token_id=1, **sampling),
        loss_temperature=1.0,
        pad_token_id=0,
        autocast=autocast,
        most_groups=8,
        draw=drawn_on(torch.device(DEVICE)) if fast else None,
        steps=DecodeSteps(capture=not ON_CPU) if fast else None,
    )


def test_graphs_give_the_tokens_of_the_loop_without_them(model: Any) -> None:
    """Twice, so that the second batch is graphs from its first token on."""
    fast = engine_of(model, fast=True, do_sample=False)
    wanted, _ = sample(engine_of(model, fast=False, do_sample=False), PROMPTS)
    for _ in range(2):
        tokens, _ = sample(fast, PROMPTS)
        equal = sum(mine == theirs for mine, theirs in zip(tokens, wanted, strict=True))
        assert equal >= 0.9 * len(PROMPTS), "but for ties within the rounding of another attention kernel"
    assert ON_CPU or (fast._steps is not None and fast._steps._capture), "every pass was captured"


def test_versions_that_are_copied_to_one_place_give_the_same(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the graphs of one slot take is printed: `docs/what_fits.md` has no figure for it yet."""
    monkeypatch.setattr(captured, "copies_instead", lambda **bytes_of: bool(print(bytes_of)) or True)
    model = copy.deepcopy(model)
    slots = [{name: it.data.clone() for name, it in model.named_parameters()} for _ in range(3)]
    fast = engine_of(model, fast=True, do_sample=False)
    for version in range(6):
        torch.manual_seed(version)
        for name, parameter in model.named_parameters():
            slot = slots[version % 3][name]
            parameter.data = slot.add_(0.02 * torch.randn(slot.shape).to(slot))
        tokens, _ = sample(fast, PROMPTS)
        wanted, _ = sample(engine_of(model, fast=False, do_sample=False), PROMPTS)
        equal = sum(mine == theirs for mine, theirs in zip(tokens, wanted, strict=True))
        assert equal >= 0.9 * len(PROMPTS), "but for ties within the rounding of another attention kernel"
    assert ON_CPU or (fast._steps is not None and len(fast._steps._graphs) == 1), "graphs of one place"


@pytest.mark.parametrize(
    ("dtype", "mixed", "within"),
    [(torch.float32, False, 1e-3), (torch.bfloat16, False, 0.15), (torch.float32, True, 0.15)],
)
def test_log_probabilities_are_those_of_one_forward_pass(
    model: Any, dtype: torch.dtype, mixed: bool, within: float
) -> None:
    prompts, model = PROMPTS[:4], copy.deepcopy(model).to(dtype)
    autocast = partial(torch.autocast, torch.device(DEVICE).type, torch.bfloat16, enabled=mixed)
    engine = engine_of(model, fast=True, autocast=autocast, do_sample=True, top_k=0, temperature=1.0)
    for _ in range(2):  # the second time by graphs alone
        tokens, logprobs = sample(engine, prompts, seed=1)
    for prompt, ids, ours in zip(prompts, tokens, logprobs, strict=True):
        with torch.no_grad(), autocast():
            logits = model(torch.tensor([prompt + ids], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float()
        exact = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids, device=DEVICE)[:, None])[:, 0].cpu()
        torch.testing.assert_close(torch.tensor(ours), exact, atol=within, rtol=0)


def test_a_step_waits_for_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the look at which rows have ended, and one where a graph is made."""
    from async_grpo.engines import decoding

    monkeypatch.setattr(decoding, "LOOK_EVERY_GPU", 1000)
    engine = engine_of(model, fast=True, do_sample=True, top_k=0, temperature=1.0)
    sample(engine, PROMPTS)
    step = decoding.SamplingLoop.step

    def strict(loop: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return step(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    if not ON_CPU:
        monkeypatch.setattr(decoding.SamplingLoop, "step", strict)
    sample(engine, PROMPTS, seed=1)


@pytest.mark.skipif(ON_CPU, reason="the kernel needs a GPU; Triton's interpreter runs it in tests/with_triton")
def test_the_kernel_draws_with_the_frequencies_of_the_softmax() -> None:
    need_device()
    draw = drawn_on(torch.device(DEVICE))
    assert draw is not None, "it is taken"
    torch.manual_seed(0)
    row = 2 * torch.randn(1, 50, device=DEVICE)
    rows = row.expand(100_000, 50).to(torch.bfloat16).contiguous()
    sampled, logprobs = draw(rows, rows, 1.0)
    exact = torch.softmax(rows[0].float(), -1)
    found = torch.bincount(sampled, minlength=50) / len(rows)
    torch.testing.assert_close(found, exact, atol=0.01, rtol=0)
    torch.testing.assert_close(logprobs, exact.log()[sampled], atol=1e-4, rtol=0)


@pytest.mark.skipif(ON_CPU, reason="nothing is captured on a CPU")
def test_a_capture_that_fails_leaves_torch_as_it_was(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured.HostReads, "found", property(lambda _: "", lambda *_: None), raising=False)
    model = copy.deepcopy(model)
    model.model.layers[0].mlp.register_forward_hook(lambda _, given, output: output * (output.max().item() != 1e9))
    engine = engine_of(model, fast=True, do_sample=False)
    sample(engine, PROMPTS)
    assert engine._steps is not None and not engine._steps._capture, "it was tried"
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randint(2, (1000,), device=DEVICE).float().mean() > 0.1
    torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before
