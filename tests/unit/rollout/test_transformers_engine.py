"""The sampler's log-probabilities are those that the trainer computes for the same tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from async_grpo.rollout.engines.transformers import TransformersGenerator

PAD, EOS, OTHER_END = 0, 1, 2
PROMPTS = [[5, 6, 7, 8, 9], [10], [11, 12, 13]]  # of different lengths, so that two are padded


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=PAD,
        eos_token_id=EOS,
        initializer_range=0.5,  # far from uniform
    )
    return Qwen3ForCausalLM(config).eval()


def generator(model: Qwen3ForCausalLM, tokens: int = 12, **sampling: float) -> TransformersGenerator:
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "do_sample": True, **sampling}
    return TransformersGenerator(
        model,
        config=GenerationConfig(max_new_tokens=tokens, pad_token_id=PAD, eos_token_id=[EOS, OTHER_END], **settings),
        pad_token_id=PAD,
        autocast=nullcontext,
    )


def forward_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], completion: list[int], temperature: float
) -> torch.Tensor:
    """One forward pass over the whole sequence, without padding or cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_log_probabilities_are_those_of_a_forward_pass(model: Qwen3ForCausalLM, temperature: float) -> None:
    torch.manual_seed(1)
    prompts = PROMPTS * 4
    completions, logprobs = generator(model, temperature=temperature).generate(prompts)
    assert len(completions) == len(logprobs) == len(prompts)
    for prompt, ids, sampled in zip(prompts, completions, logprobs, strict=True):
        assert len(sampled) == len(ids)
        torch.testing.assert_close(
            torch.tensor(sampled), forward_logprobs(model, prompt, ids, temperature), atol=1e-5, rtol=0
        )


def test_they_are_of_the_full_distribution_even_when_sampling_truncates_it(model: Qwen3ForCausalLM) -> None:
    torch.manual_seed(1)
    [ids], [sampled] = generator(model, temperature=0.7, top_k=2).generate([PROMPTS[0]])
    torch.testing.assert_close(torch.tensor(sampled), forward_logprobs(model, PROMPTS[0], ids, 0.7), atol=1e-5, rtol=0)


def test_a_completion_ends_with_its_first_end_token_and_has_no_padding(model: Qwen3ForCausalLM) -> None:
    torch.manual_seed(2)
    completions, logprobs = generator(model, tokens=40, temperature=2.0).generate(PROMPTS * 8)
    ended = [ids for ids in completions if ids[-1] in (EOS, OTHER_END)]
    assert {ids[-1] for ids in ended} == {EOS, OTHER_END}, "the seed shows both"
    assert len({len(ids) for ids in completions}) > 1
    for ids, sampled in zip(completions, logprobs, strict=True):
        assert not {EOS, OTHER_END} & set(ids[:-1])
        assert ids[-1] in (EOS, OTHER_END) or len(ids) == 40
        assert len(ids) == len(sampled)


def test_padding_does_not_change_what_is_sampled(model: Qwen3ForCausalLM) -> None:
    greedy = generator(model, do_sample=False)
    together, _ = greedy.generate(PROMPTS)
    alone = [greedy.generate([prompt])[0][0] for prompt in PROMPTS]
    assert together == alone


def test_the_same_seed_samples_the_same(model: Qwen3ForCausalLM) -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(generator(model).generate(PROMPTS))
    assert results[0] == results[1]


def test_generation_can_be_broken_off_between_tokens(model: Qwen3ForCausalLM) -> None:
    class Stop(Exception):
        pass

    steps = []

    def on_step() -> None:
        steps.append(True)
        if len(steps) == 3:
            raise Stop

    breakable = generator(model)
    breakable.on_step = on_step
    with pytest.raises(Stop):
        breakable.generate(PROMPTS)
    assert len(steps) == 3
    breakable.on_step = lambda: None
    assert len(breakable.generate(PROMPTS)[0]) == 3, "and it works again afterwards"


def test_nothing_of_it_asks_for_gradients(model: Qwen3ForCausalLM) -> None:
    generator(model).generate(PROMPTS)
    assert all(parameter.grad is None for parameter in model.parameters())
