"""What decoding by a head gives, with the engine of the workers and with `generate` of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guided_models import PAD, PROMPTS, TOKENS, Words, engine, head_of, padded, processors, reference

from async_grpo.errors import RunRefused, UnsupportedError, UsageError
from async_grpo.tokens import ids_and_logprobs
from async_grpo_experiments.guidance import Guidance
from async_grpo_experiments.guidance.divergence import divergence_of_policy
from async_grpo_experiments.guidance.offsets import MODES
from kit.engines import group, run

ALL_MODES = sorted({(mode, loss) for loss, modes in MODES.items() for mode in modes})


@pytest.fixture(scope="module")
def model() -> Any:
    return reference()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_head_of_zeros_and_a_disabled_one_are_the_reference_bit_for_bit(model: Any, temperature: float) -> None:
    def completions(guidance: Guidance | None) -> Any:
        prompts = [group([prompt] * 4, seq=index, seed=index) for index, prompt in enumerate(PROMPTS)]
        return [ids_and_logprobs(one.tokens) for one in run(engine(model, guidance, temperature=temperature), prompts)]

    wanted = completions(None)
    for mode, loss in [*ALL_MODES, ("disabled", "bce")]:
        head = head_of(model, trained=mode == "disabled", loss=loss, temperature=temperature)
        assert completions(Guidance(head=head, eta=0.1, mode=mode)) == wanted, mode


def test_the_workers_engine_samples_as_generate_of_transformers(model: Any) -> None:
    """Greedy, with rows that end early; and sampled completions say how far they are from the reference."""
    guidance = Guidance(head=head_of(model), eta=0.1)
    ids, mask = padded(PROMPTS)
    guiding = processors(guidance, model, mask, temperature=0.0)
    how = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    made = model.generate(ids, logits_processor=guiding, **how)
    groups = [group([prompt], seq=i, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
    sampled = run(engine(model, guidance), groups)
    for one in sampled:
        ours = one.tokens[0].ids
        assert made[one.prepared.job.seq, ids.shape[1] :][: len(ours)].tolist() == ours
        assert one.divergences == [], "greedy decoding has no distribution"


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, -1), (0.7, 4)])
def test_a_completions_divergence_is_that_of_its_distributions(model: Any, temperature: float, top_k: int) -> None:
    """Against one forward pass of the reference and of the head, without its cache, over each prefix."""
    head = head_of(model, temperature=temperature)
    decoding = engine(model, Guidance(head=head, eta=0.3, top_k=top_k), temperature=temperature)
    groups = [group([prompt] * 3, seq=i, seed=i) for i, prompt in enumerate(PROMPTS)]
    sampled = sorted(run(decoding, groups), key=lambda one: one.prepared.job.seq)
    assert {len(tokens.ids) for one in sampled for tokens in one.tokens} != {10}, "some end early"
    for prompt, one in zip(PROMPTS, sampled, strict=True):
        for tokens, found in zip(one.tokens, one.divergences, strict=True):
            ids, mask = padded([prompt + tokens.ids[:t] for t in range(len(tokens.ids))])
            with torch.no_grad():
                positions = (mask.cumsum(1) - 1).clamp_min(0)
                logits = model(ids, attention_mask=mask, position_ids=positions).logits[:, -1]
            alone = Guidance(head=head, eta=0.3, top_k=top_k, use_cache=False)
            [processor] = processors(alone, model, mask, temperature)
            guided = processor(ids, logits)
            assert torch.equal(guided[:, TOKENS:], logits[:, TOKENS:]), "rows that pad the embedding have no score"
            logq, logp = ((scores / temperature).log_softmax(-1) for scores in (guided, logits))
            assert found == pytest.approx(float((logq.exp() * (logq - logp)).sum()), abs=1e-4)


def test_the_divergence_of_a_trained_policy_counts_its_completion_alone(model: Any) -> None:
    policy = reference(seed=3)
    ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 11, PAD]]), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    found = divergence_of_policy(policy, model, ids, mask, temperature=0.5)
    for row, position in mask.nonzero().tolist():
        with torch.no_grad():
            before = ids[row : row + 1, :position]
            logq, logp = ((one(before).logits[0, -1] / 0.5).log_softmax(-1) for one in (policy, model))
        assert float(found[row, position]) == pytest.approx(float((logq.exp() * (logq - logp)).sum()), rel=1e-4)
    assert bool((found[mask == 0] == 0).all())
    assert bool((divergence_of_policy(model, model, ids, mask) == 0).all())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eta": 0.0}, "eta must be over 0, in units of the reward"),
        ({"eta": float("nan")}, "eta must be over 0"),
        ({"eta": 0.2, "inverse_eta": 5.0}, "Give one of eta and inverse_eta"),
        ({}, "Give one of eta and inverse_eta"),
        ({"inverse_eta": 0.0}, "inverse_eta must be over 0"),
        ({"eta": 0.2, "mode": "histogram"}, "mode 'histogram' cannot take a head that was trained with bce"),
        ({"eta": 0.2, "top_k": 0}, "top_k must be at least 1"),
    ],
)
def test_a_strength_or_mode_that_cannot_be_used_is_refused(model: Any, wrong: dict[str, Any], message: str) -> None:
    assert Guidance(head=head_of(model), inverse_eta=5.0).eta == 0.2
    with pytest.raises(UsageError, match=message):
        Guidance(head=head_of(model), **wrong)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"temperature": 0.6}, r"at temperature 1.0, and decoding is at 0.6. Set the temperature to 1.0"),
        ({"model": 4}, "whose weights are not those of the model that decodes"),
        ({"words": Words("v")}, r"words of w \(22 tokens\).*words of v \(22 tokens\).*differs is 0: 'w0' there, 'v0'"),
        ({"words": Words(count=23)}, r"\(23 tokens\). The first that differs is 22: none there, 'w22' here"),
    ],
)
def test_a_head_of_another_sampler_is_refused(model: Any, other: dict[str, Any], message: str) -> None:
    decodes = reference(other["model"]) if "model" in other else model
    words, temperature = other.get("words", Words()), other.get("temperature", 1.0)
    with pytest.raises(RunRefused, match=message):
        Guidance(head=head_of(model), eta=0.2).processors(decodes, words, attention_mask=None, temperature=temperature)


def test_padded_prompts_without_a_mask_and_a_second_generate_are_refused(model: Any) -> None:
    guidance = Guidance(head=head_of(model), eta=0.2)
    ids, mask = padded(PROMPTS)
    with pytest.raises(UsageError, match="guidance has no attention_mask"):
        processors(guidance, model, None)(ids, torch.randn(3, 24))
    used = processors(guidance, model, mask)
    used(ids, torch.randn(3, 24))
    with pytest.raises(UnsupportedError, match="new processors for each generate"):
        used(ids.flip(0), torch.randn(3, 24))
    with pytest.raises(UsageError, match="in place of num_return_sequences"):
        processors(guidance, model, mask)(ids.repeat(2, 1), torch.randn(6, 24))


def test_a_head_with_windows_decodes_without_cache(model: Any) -> None:
    head = head_of(model)
    head.backbone.config.layer_types = ["sliding_attention", "full_attention"]
    [processor] = processors(Guidance(head=head, eta=0.2), model, None)
    assert processor._cache is None
