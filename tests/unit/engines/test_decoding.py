"""Our sampling loop against the one of transformers: the same tokens, whoever has left the batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from decoding_models import (
    EOS,
    GROUPS,
    PAD,
    PROMPTS,
    VOCABULARY,
    begin,
    completions,
    config,
    inputs_of,
    made,
    plain,
    run,
    with_sliding_window,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, TopPLogitsWarper
from transformers.cache_utils import DynamicLayer

from async_grpo.engines import decoding
from async_grpo.engines.decoding import GROWTH, IntegerTopP, PreallocatedLayer, SamplingLoop, without_float_cumsum

MAMBA = {"mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8}
WITH_A_STATE = {  # of fixed size, in layers of the cache or in modules of their own
    "mamba": {"state_size": 8},
    "mamba2": {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {"head_dim": 8, **MAMBA},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 64},
}


def both(
    model: PreTrainedModel, prompts: list[list[int]], lengths: tuple[int, ...] | None = None, **settings: Any
) -> tuple[Tensor, Tensor, SamplingLoop]:
    """What transformers' own loop samples, what ours does, and our loop."""
    with torch.no_grad():
        theirs = model.generate(**inputs_of(prompts, lengths, **settings))
    loop = begin(model, inputs_of(prompts, lengths, **settings))
    run(loop)
    return theirs[:, max(map(len, prompts)) :], completions(loop), loop


@pytest.mark.parametrize("make_model", [plain, with_sliding_window])
@pytest.mark.parametrize("lengths", [None, (20, 3, 7), (2, 2, 2, 20), (5,), (20,)])
def test_greedy_tokens_are_those_of_transformers(make_model: Any, lengths: tuple[int, ...] | None) -> None:
    theirs, ours, loop = both(make_model(), GROUPS, lengths)
    assert theirs.tolist() == ours.tolist()
    ends = [ids.index(EOS) + 1 if EOS in ids else len(ids) for ids in ours.tolist()]
    assert loop.lengths_B.tolist() == ends


@pytest.mark.parametrize("kind", WITH_A_STATE)
def test_a_model_with_a_state_samples_as_in_transformers(kind: str) -> None:
    theirs, ours, _ = both(made(kind, **WITH_A_STATE[kind]), GROUPS, (20, 3, 7))
    assert theirs.tolist() == ours.tolist()
    assert len(set(map(tuple, ours.tolist()))) > 3, "the prompts must matter"


@pytest.mark.parametrize("make_model", [plain, with_sliding_window])
@pytest.mark.parametrize("lengths", [(20, 3, 7), (2, 2, 2, 20), (9, 17), (5,), (20,)])
def test_rows_that_end_between_two_looks_get_nothing_more(
    make_model: Any, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where what has ended is decoded further until the next look."""
    monkeypatch.setattr(decoding, "LOOK_EVERY_CPU", 8)
    theirs, ours, loop = both(make_model(), GROUPS, lengths)
    width = theirs.shape[1]
    assert ours.tolist() == theirs.tolist()
    assert set(loop.completions_BC[:, width:].flatten().tolist()) <= {PAD}, "steps up to the look at which all ended"
    assert loop.lengths_B.tolist() == [lengths[row % len(lengths)] for row in range(len(GROUPS))]


@pytest.mark.parametrize("look_every", [1, 8])
def test_groups_are_told_once_with_all_that_was_sampled(look_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "LOOK_EVERY_CPU", look_every)
    lengths = (2, 3, 2, 3, 20, 1, 1, 1, 5, 6, 7, 9)
    loop = begin(plain(), inputs_of(GROUPS, lengths), group_size=4)
    assert run(loop) == [(0, [2, 3, 2, 3]), (2, [5, 6, 7, 9]), (1, [20, 1, 1, 1])]
    assert loop.lengths_B.tolist() == list(lengths)


def test_groups_may_differ_in_size() -> None:
    loop = plain().generate(
        **inputs_of(GROUPS[:6], (2, 3, 20, 1, 1, 4)),
        custom_generate=partial(SamplingLoop, temperature=1.0, pad_token_id=PAD, group_sizes=[1, 3, 2]),
    )
    assert run(loop) == [(0, [2]), (2, [1, 4]), (1, [3, 20, 1])]


@pytest.mark.parametrize("look_every", [1, 8])
def test_rows_end_at_the_lengths_of_their_groups(look_every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And are the first tokens of what they would be with room for more."""
    monkeypatch.setattr(decoding, "LOOK_EVERY_CPU", look_every)
    run(whole := begin(plain(), inputs_of(GROUPS, (9, 20)), group_size=4))
    run(loop := begin(plain(), inputs_of(GROUPS, (9, 20)), group_size=4, most_tokens=[20, 3, 12]))
    assert loop.lengths_B.tolist() == [9, 20, 9, 20, 3, 3, 3, 3, 9, 12, 9, 12]
    for cut, row, length in zip(loop.completions_BC, whole.completions_BC, loop.lengths_B, strict=True):
        assert cut[:length].tolist() == row[:length].tolist()


def test_a_prompt_that_begins_with_the_padding_token_is_no_shorter_prompt() -> None:
    model = plain()
    ids = torch.tensor([[PAD, 5, 6], [PAD, 5, 6]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask, "generation_config": config()}
    theirs = model.generate(**inputs)
    run(loop := begin(model, inputs))
    assert theirs[:, 3:].tolist() == completions(loop).tolist()
    assert not torch.equal(loop.logprobs_BC[0], loop.logprobs_BC[1])


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 8},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_the_generation_config_asks_for_is_done(settings: dict[str, Any]) -> None:
    theirs, ours, _ = both(plain(), GROUPS, **settings)
    assert theirs.tolist() == ours.tolist()


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.3}, {"temperature": 0.01}], ids=str)
def test_samples_come_from_the_distribution_that_was_asked_for(settings: dict[str, Any]) -> None:
    """With nearly all weight on few tokens, samples show whether the processors were applied."""
    model = plain()
    torch.manual_seed(0)
    _, ours, loop = both(model, [PROMPTS[0]] * 64, do_sample=True, **{"top_k": 0, "max_new_tokens": 1, **settings})
    logits = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    order = logits.argsort(descending=True).tolist()
    assert set(ours[:, -1].tolist()) <= set(order[: 1 if "temperature" in settings else 2])
    torch.testing.assert_close(loop.logprobs_BC[:, 0], logits.log_softmax(-1)[ours[:, -1]])


def test_samples_have_the_frequencies_of_the_softmax() -> None:
    model = plain()
    torch.manual_seed(0)
    rows = 4000
    _, ours, _ = both(model, [PROMPTS[2]] * rows, do_sample=True, top_k=0, max_new_tokens=1)
    expected = model(torch.tensor([PROMPTS[2]])).logits[0, -1].softmax(-1)
    found = torch.bincount(ours[:, -1], minlength=VOCABULARY) / rows
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_rows_that_have_ended_are_not_decoded_any_more() -> None:
    model = plain()
    batches = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: batches.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    run(begin(model, inputs_of(GROUPS, (3, 3, 20))))
    assert batches[0] == (len(PROMPTS), 5), "each prompt once"
    assert batches[1:] == [(12, 1)] * 2 + [(4, 1)] * 17


def test_a_preallocated_layer_holds_what_a_plain_one_holds() -> None:
    torch.manual_seed(0)
    ours, plain_layer = DynamicCache(), DynamicCache()
    ours.layers, plain_layer.layers = [PreallocatedLayer()], [DynamicLayer()]
    ours.layer_class_to_replicate = plain_layer.layer_class_to_replicate = None
    for step, tokens in enumerate([5, *[1] * (2 * GROWTH), 3]):
        rows = 4 if step < GROWTH else 2
        keys, values = torch.randn(rows, 2, tokens, 8), torch.randn(rows, 2, tokens, 8)
        if step == GROWTH:
            for cache in (ours, plain_layer):
                cache.batch_select_indices(torch.tensor([3, 1]))
        for mine, expected in zip(ours.update(keys, values, 0), plain_layer.update(keys, values, 0), strict=True):
            assert torch.equal(mine, expected)
        assert ours.get_seq_length() == plain_layer.get_seq_length()


# --- Top-p of deterministic runs on a GPU: -----------------------------------------------------------------------

ROUNDED = 1e-5  # distance from the limit up to which a sum of float32 may fall on its other side
CUDA = torch.device("cuda")


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class AsOnCuda(TorchDispatchMode):
    """Raises where CUDA does under `torch.use_deterministic_algorithms`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_p", [0.0, 0.05, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("least", [1, 2])
def test_the_kept_set_is_that_of_transformers(top_p: float, spread: float, least: int) -> None:
    torch.manual_seed(0)
    scores_BV = torch.randn(16, 5000) * spread
    scores_BV[:, :10] = -torch.inf  # what a processor before it has removed
    warper = TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    ids = torch.zeros(16, 1, dtype=torch.long)
    theirs, ours = warper(ids, scores_BV), IntegerTopP(warper)(ids, scores_BV)
    order = scores_BV.argsort(dim=-1)
    below = scores_BV.double().softmax(-1).gather(1, order).cumsum(-1).gather(1, order.argsort(dim=-1))
    clear = (below - (1 - top_p)).abs() > ROUNDED
    assert torch.equal(ours[clear], theirs[clear])
    assert (ours.isfinite().sum(-1) >= least).all()
    assert torch.equal(ours[ours.isfinite()], scores_BV[ours.isfinite()])


def test_equal_scores_keep_no_more_than_they_have_to() -> None:
    """All sums are exact: three of eight equal tokens have .375, four have the half."""
    kept = IntegerTopP(TopPLogitsWarper(0.5))(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 8)).isfinite()
    assert int(kept.sum()) == 4


@pytest.mark.usefixtures("deterministic")
def test_it_is_taken_on_a_gpu_in_a_deterministic_run_only() -> None:
    processors = LogitsProcessorList([TopPLogitsWarper(0.9)])
    assert without_float_cumsum(processors, torch.device("cpu")) is processors
    assert [type(p) for p in without_float_cumsum(processors, CUDA)] == [IntegerTopP]
    torch.use_deterministic_algorithms(False)
    assert without_float_cumsum(processors, CUDA) is processors


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("on_cuda", [True, False])
def test_a_batch_with_top_p_is_sampled_without_what_raises(on_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for CUDA raises for transformers' own processor, so what it lets pass has none."""
    if on_cuda:
        monkeypatch.setattr(decoding, "without_float_cumsum", lambda ps, _: without_float_cumsum(ps, CUDA))
    inputs = inputs_of(PROMPTS, do_sample=True, top_p=0.9, top_k=0, max_new_tokens=3)
    with nullcontext() if on_cuda else pytest.raises(RuntimeError, match="cumsum_cuda_kernel"):
        with torch.no_grad(), AsOnCuda():
            run(begin(plain(), inputs))
