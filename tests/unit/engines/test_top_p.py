"""Top-p of deterministic runs on a GPU: the set that transformers keeps, without a cumulative sum of floats."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from decoding_models import PROMPTS, begin, inputs_of, plain, run
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList, TopPLogitsWarper

from async_grpo.engines import decoding
from async_grpo.engines.decoding import IntegerTopP, without_float_cumsum

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
