"""The sampler's log-probabilities are those that the trainer computes for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decoding_models import EOS, PAD, PROMPTS, plain
from peft import LoraConfig, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM, StoppingCriteriaList, StopStringCriteria

from async_grpo.engines.transformers import TransformersEngine
from async_grpo.errors import RunRefused
from kit.engines import group, run, sample, transformers_of

OTHER_END = 2


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return plain()


def engine_of(
    model: Qwen3ForCausalLM,
    tokens: int | None = 12,
    loss_temperature: float | None = None,
    stopping: StoppingCriteriaList | None = None,
    **sampling: float,
) -> TransformersEngine:
    settings = {"temperature": 0.7, "top_p": 1.0, **sampling}
    options = {"loss_temperature": loss_temperature or settings["temperature"], "stopping": stopping}
    return transformers_of(model, tokens, PAD, [EOS, OTHER_END], settings, **options)


def forward_logprobs(
    model: Qwen3ForCausalLM, prompt: list[int], completion: list[int], temperature: float
) -> torch.Tensor:
    """One forward pass over the whole sequence, without padding or cache."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def test_a_jobs_own_temperature_of_one_is_taken_whatever_the_loss_has(model: Qwen3ForCausalLM) -> None:
    """`generate` adds no processor for it, so nothing else may be sampled from than the logits as they are."""
    prompts = [group(PROMPTS * 4, temperature=1.0, top_p=1.0, top_k=0)]
    ours, wanted = (
        run(engine_of(model, tokens=30, loss_temperature=loss, temperature=0.7), prompts)[0].tokens
        for loss in (0.7, 1.0)
    )
    assert len(ours) == 12
    assert [one.ids for one in ours] == [one.ids for one in wanted]


def test_a_row_ends_behind_a_stop_string(model: Qwen3ForCausalLM) -> None:
    letters = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwx")}))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split(Regex("[a-z]"), "isolated"), decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    whole, _ = sample(engine_of(model, tokens=40), PROMPTS, seed=1)
    stop = max(whole, key=len)[4]
    assert any(ids[-1] != stop for ids in whole)
    stopping = StoppingCriteriaList([StopStringCriteria(tokenizer, [tokenizer.convert_ids_to_tokens(stop)])])
    cut, _ = sample(engine_of(model, tokens=40, stopping=stopping), PROMPTS, seed=1)
    assert all(stop not in ids[:-1] for ids in cut)
    assert any(ids[-1] == stop for ids in cut)


@pytest.mark.parametrize(
    ("temperature", "sampling"),
    [
        (0.7, {}),
        (1.0, {}),
        (1.5, {}),
        (0.7, {"top_k": 2}),  # of the full distribution even when sampling truncates it
        (1.0, {"temperature": 0.2, "loss_temperature": 1.0}),  # of the loss, whatever was sampled with
    ],
)
def test_log_probabilities_are_those_of_a_forward_pass(
    model: Qwen3ForCausalLM, temperature: float, sampling: dict[str, float]
) -> None:
    prompts = PROMPTS * 4
    completions, logprobs = sample(engine_of(model, **{"temperature": temperature, **sampling}), prompts, seed=1)
    assert len(completions) == len(logprobs) == len(prompts)
    for prompt, ids, sampled in zip(prompts, completions, logprobs, strict=True):
        assert len(sampled) == len(ids)
        expected = forward_logprobs(model, prompt, ids, temperature)
        torch.testing.assert_close(torch.tensor(sampled), expected, atol=1e-5, rtol=0)


def test_a_completion_ends_with_its_first_end_token_and_has_no_padding(model: Qwen3ForCausalLM) -> None:
    completions, logprobs = sample(engine_of(model, tokens=40, temperature=2.0), PROMPTS * 8, seed=2)
    ended = [ids for ids in completions if ids[-1] in (EOS, OTHER_END)]
    assert {ids[-1] for ids in ended} == {EOS, OTHER_END}, "the seed shows both"
    assert len({len(ids) for ids in completions}) > 1
    for ids, sampled in zip(completions, logprobs, strict=True):
        assert not {EOS, OTHER_END} & set(ids[:-1])
        assert ids[-1] in (EOS, OTHER_END) or len(ids) == 40
        assert len(ids) == len(sampled)


def test_padding_does_not_change_what_is_sampled(model: Qwen3ForCausalLM) -> None:
    greedy = engine_of(model, do_sample=False)
    together, _ = sample(greedy, PROMPTS)
    assert together == [sample(greedy, [prompt])[0][0] for prompt in PROMPTS]


def test_the_same_seed_samples_the_same(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model)
    first, other, again = (sample(engine, PROMPTS, seed=seed) for seed in (3, 4, 3))
    assert first == again != other


def test_groups_come_back_with_their_last_completion(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model, tokens=40, temperature=2.0)
    groups = [group([prompt] * 2, seq) for seq, prompt in enumerate(PROMPTS * 3)]
    took, steps = {}, 0
    new = groups
    while len(took) < len(groups):
        steps += 1
        for sampled in engine.sample(new):
            took[sampled.prepared] = steps
            assert max(map(len, sampled.tokens)) == steps
        new = []
    assert len(set(took.values())) > 1, "the seed shows groups of different lengths"


def test_a_batch_can_be_dropped_between_tokens(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model)
    for _ in range(3):
        assert engine.sample([group(PROMPTS)]) == []
    engine.close()
    assert engine.sample([]) == []
    assert len(sample(engine, PROMPTS)[0]) == 3, "and it works again afterwards"


def test_work_between_tokens_is_not_done_in_the_samplers_precision(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model)
    engine._autocast = lambda: torch.autocast("cpu", torch.bfloat16)  # type: ignore[assignment, return-value]
    engine.sample([group(PROMPTS)])
    assert torch.is_grad_enabled()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    engine.close()


def test_an_error_costs_one_group_of_a_batch(model: Qwen3ForCausalLM) -> None:
    groups = [group([PROMPTS[0]] * 2), group([[99]] * 2, 1), group([PROMPTS[2]] * 2, 2)]  # there is no token 99
    sampled = {one.prepared.job.seq: one for one in run(engine_of(model), groups)}
    assert isinstance(sampled[1].error, IndexError)
    assert [len(sampled[seq].tokens) for seq in (0, 2)] == [2, 2]


class GeneratesItself(Qwen3ForCausalLM):
    def generate(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: Any) -> torch.Tensor:
        return torch.cat([input_ids, input_ids.new_full((len(input_ids), 3), 7)], dim=1)


class TakesAnything(Qwen3ForCausalLM):
    def generate(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids


class CutsTheResult(Qwen3ForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)[:, :4]  # type: ignore[index]


class PassesOn(Qwen3ForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


class InInferenceMode(Qwen3ForCausalLM):
    """As Unsloth wraps it with `fast_inference=False`."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            return super().generate(*args, **kwargs)


@pytest.mark.parametrize("its_class", [GeneratesItself, TakesAnything, CutsTheResult])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_that_generates_by_itself_is_refused(
    its_class: type[Qwen3ForCausalLM], adapted: bool, model: Qwen3ForCausalLM
) -> None:
    own: Any = its_class(model.config).eval()
    [refused] = run(engine_of(get_peft_model(own, LoraConfig(r=2)) if adapted else own), [group(PROMPTS)])
    assert isinstance(refused.error, RunRefused)
    assert f"{its_class.__name__} has a generate of its own" in str(refused.error)
    way_out = "Take --generator vllm, remove it from the model, let a rollout_func of the trainer call it"
    assert way_out in str(refused.error)


@pytest.mark.parametrize("its_class", [PassesOn, InInferenceMode])
def test_a_generate_that_passes_on_to_transformers_is_none_of_its_own(
    its_class: type[Qwen3ForCausalLM], model: Qwen3ForCausalLM
) -> None:
    """What is made in inference mode could not be written to behind it, so the loop also begins behind it."""
    own = its_class(model.config).eval()
    own.load_state_dict(model.state_dict())
    assert sample(engine_of(own), PROMPTS) == sample(engine_of(model), PROMPTS)


def test_a_type_error_of_transformers_costs_one_group(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3ForCausalLM, "prepare_inputs_for_generation", None)
    [failed] = run(engine_of(model), [group(PROMPTS)])
    assert isinstance(failed.error, TypeError)


def test_a_job_that_asks_for_temperature_0_is_decoded_greedily_beside_others(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model, temperature=1.5)
    greedy = [group([prompt], seq=seq, temperature=0.0, top_p=1.0, top_k=0) for seq, prompt in enumerate(PROMPTS)]
    found = {one.prepared.job.seq: one for one in run(engine, [*greedy, group([PROMPTS[0]] * 8, seq=9)])}
    for seq, prompt in enumerate(PROMPTS):
        plain = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=PAD, eos_token_id=[EOS, OTHER_END]
        )
        assert [tokens.ids for tokens in found[seq].tokens] == [plain[0, len(prompt) :].tolist()]
    others = {tuple(tokens.ids) for tokens in found[9].tokens}
    assert len(others) > 1, "the other group is sampled at the trainer's temperature"


@contextmanager
def forward_batches(model: Qwen3ForCausalLM) -> Iterator[list[int]]:
    """The number of rows of each forward pass."""
    rows: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda module, args, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    yield rows
    handle.remove()


def test_jobs_that_differ_in_length_alone_are_one_batch(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model, min_new_tokens=9)
    lengths: list[dict[str, float]] = [{"max_tokens": 3}, {}, {"max_tokens": 20}, {"temperature": 0.0}]
    asked = [group([prompt], seq=seq, **own) for seq, (prompt, own) in enumerate(zip([*PROMPTS, [4]], lengths))]
    with forward_batches(model) as batches:
        sampled = {one.prepared.job.seq: len(one.tokens[0]) for one in run(engine, asked)}
    assert batches[0] == 3 and batches.count(1) > 3, "the greedy one is apart"
    assert sampled[0] == 3 and 9 <= sampled[1] <= 12 and 9 <= sampled[2] <= 20


def test_jobs_that_sample_alike_share_a_batch_where_the_trainer_sets_no_length(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model, tokens=None, max_length=12, min_new_tokens=4)
    with forward_batches(model) as batches:
        run(engine, [group([prompt], seq=seq, temperature=0.5) for seq, prompt in enumerate(PROMPTS[:2])])
    assert batches[0] == 2


def test_a_job_truncates_as_it_asks_and_keeps_the_log_probabilities_of_the_loss(model: Qwen3ForCausalLM) -> None:
    engine = engine_of(model, temperature=0.7)
    for asked in ({"top_p": 1e-6, "top_k": 0}, {"top_p": 1.0, "top_k": 1}):
        [likeliest] = run(engine, [group([PROMPTS[1]] * 4, seq=1, temperature=2.0, **asked)])
        assert len({tuple(tokens.ids) for tokens in likeliest.tokens}) == 1, asked
    expected = forward_logprobs(model, PROMPTS[1], likeliest.tokens[0].ids, 0.7)
    torch.testing.assert_close(torch.tensor(likeliest.tokens[0].logprobs), expected, atol=1e-5, rtol=0)
    after = run(engine, [group([PROMPTS[1]] * 8, seq=2)])
    assert len({tuple(tokens.ids) for tokens in after[0].tokens}) > 1, "the trainer's own settings are what they were"
