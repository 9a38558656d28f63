"""Log-probabilities over kept tokens: against a table made by hand, and against autograd of an explicit softmax."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from async_grpo.errors import UnsupportedError
from async_grpo.setup.trl_compat import TorchLogProbs
from async_grpo.tokens.kept_tokens import pack
from async_grpo.training.corrections import kept_log_probs
from async_grpo.training.corrections.kept_log_probs import IDS, SIZES, OverKeptTokens, Sets, columns, rows_of
from async_grpo.training.corrections.trl_loss import CorrectedLoss
from kit.groups import make_group, make_job

VOCABULARY, HIDDEN = 23, 6


def sets_of(*sets: list[int]) -> Sets:
    """The token itself first in each."""
    sizes = torch.tensor([len(each) for each in sets])
    return Sets(sizes, torch.tensor([token for each in sets for token in each], dtype=torch.long))


def over(sets: Sets) -> OverKeptTokens:
    return OverKeptTokens(sets).instead_of(TorchLogProbs)


def test_a_table_made_by_hand() -> None:
    """The head is the identity, so hidden states are logits: probabilities 1/8, 2/8, 1/8, 4/8 of four tokens.

    Over {1, 3} token 1 has 2/6, over {0, 1, 2} token 0 has 1/4, alone token 2 has 1; without a set token 3 has 4/8.
    """
    logits = torch.tensor([log(1), log(2), log(1), log(4)]).repeat(4, 1)
    targets = torch.tensor([1, 0, 2, 3])
    function = over(sets_of([1, 3], [0, 1, 2], [2], []))
    found, *_ = function.apply(logits, torch.eye(4), None, targets, 1.0, 8)
    assert_close(found.exp(), torch.tensor([1 / 3, 1 / 4, 1.0, 1 / 2]))
    assert function.left == 0


def random_case(tokens: int = 40, dtype: Any = torch.float64) -> tuple[Tensor, Tensor, Tensor, Sets]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype)
    weight, bias = (torch.randn(VOCABULARY, *size, generator=generator, dtype=dtype) for size in ((HIDDEN,), ()))
    chosen = [torch.randperm(VOCABULARY, generator=generator)[: index % 8].tolist() for index in range(tokens)]
    return hidden, weight, bias, sets_of(*chosen)


def explicit(logits: Tensor, targets: Tensor, sets: Sets) -> Tensor:
    """Minus infinity outside of the sets, then a softmax. A token whose set is not known has them all."""
    mask = torch.full_like(logits, -torch.inf)
    rows = torch.repeat_interleave(torch.arange(len(targets)), sets.sizes)
    mask[rows, sets.ids] = 0
    mask[sets.sizes == 0] = 0
    return torch.log_softmax(logits + mask, dim=-1).gather(1, targets[:, None])[:, 0]


def scaled(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: dict[str, Any]) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias) * scale["logit_scale"]
    if scale["softcap"] is not None:
        logits = scale["softcap"] * torch.tanh(logits / scale["softcap"])
    return logits / scale["temperature"]


@pytest.mark.parametrize("piece", [1 << 23, 5 * HIDDEN, 1], ids=["in one piece", "in several", "one token a piece"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "scale",
    [
        {"temperature": 0.7, "softcap": None, "logit_scale": 1.0},
        {"temperature": 1.3, "softcap": 2.0, "logit_scale": 0.5},
    ],
    ids=["temperature", "softcap"],
)
def test_values_and_gradients_are_those_of_an_explicit_softmax(
    scale: dict[str, Any], with_bias: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_log_probs, "PIECE", piece)
    hidden, weight, bias, sets = random_case(dtype=torch.float32)
    own = (sets.sizes > 0).nonzero()[:, 0]
    targets = torch.full((len(hidden),), 3)
    targets[own] = sets.ids[(sets.sizes.cumsum(0) - sets.sizes)[own]]
    grad = torch.randn(len(hidden), generator=torch.Generator().manual_seed(1))
    results = []
    for compute in (
        lambda h, w, b: over(sets).apply(
            h, w, b, targets, scale["temperature"], 8, scale["softcap"], scale["logit_scale"], ("entropy",)
        )[0],
        lambda h, w, b: explicit(scaled(h, w, b, scale), targets, sets),
    ):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight, *[bias] * with_bias)]
        found = compute(*leaves, *[None] * (not with_bias))
        found.backward(grad)
        results.append([found, *(leaf.grad for leaf in leaves)])
    for ours, expected in zip(*results, strict=True):
        assert_close(ours, expected, atol=2e-5, rtol=1e-4)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, _ = random_case(2, dtype=torch.float32)
    hidden.requires_grad_()
    found, *_ = over(sets_of([4, 5], [6])).apply(hidden, weight, None, torch.tensor([4, 6]), 1.0, 8)
    found.sum().backward()
    assert hidden.grad is not None and hidden.grad[0].any()
    assert not hidden.grad[1].any(), "the only token that was kept is certain, whatever the weights"


def test_the_calls_of_a_batch_take_its_tokens_one_after_another() -> None:
    hidden, weight, _, _ = random_case(3, dtype=torch.float32)
    ids = torch.tensor([4, 6, 7])
    once, function = (over(sets_of([4, 5], [6], [7, 1, 2])) for _ in range(2))
    whole, *_ = once.apply(hidden, weight, None, ids, 1.0, 8)
    parts = [function.apply(hidden[part], weight, None, ids[part], 1.0, 8)[0] for part in (slice(0, 2), slice(2, 3))]
    assert_close(torch.cat(parts), whole)
    assert function.left == 0


def test_other_tokens_than_were_sampled_are_refused() -> None:
    hidden, weight, _, _ = random_case(2, dtype=torch.float32)
    for ids in ([6, 4], [4, 6, 1]):
        function = over(sets_of([4, 5], [6]))
        with pytest.raises(UnsupportedError, match="other tokens than those"):
            function.apply(hidden[[0] * len(ids)], weight, None, torch.tensor(ids), 1.0, 8)


class FullSoftmax:
    def _get_per_token_logps_and_entropies(self, model: Any, ids: Tensor, mask: Any, logits_to_keep: int) -> Any:
        return torch.zeros(len(ids), logits_to_keep, requires_grad=True), None, None


class Corrected(CorrectedLoss, FullSoftmax):
    model = torch.nn.Identity().eval()
    _kept = columns([(np.array([1], np.int32), np.array([4], np.int32))] * 2, 1, torch.device("cpu"))


@pytest.mark.parametrize("mask", [None, torch.ones(1, 1)], ids=["without a mask", "of one row of two"])
def test_a_loss_that_asks_so_that_the_sets_cannot_be_found_is_refused(mask: Any) -> None:
    """It would get the full softmax, and divide that by what vLLM has drawn from."""
    trainer = Corrected()
    trainer._in_loss = {}
    with pytest.raises(UnsupportedError, match="Corrected does not compute its log-probabilities by TRL's code"):
        trainer._get_per_token_logps_and_entropies(None, torch.tensor([[4]]), mask, 1)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    hidden, weight, _, _ = random_case(1, dtype=torch.float32)
    function = over(sets_of([4, VOCABULARY]))
    with pytest.raises(UnsupportedError, match=f"kept token {VOCABULARY}, and the model has {VOCABULARY} tokens"):
        function.apply(hidden, weight, None, torch.tensor([4]), 1.0, 8)


def test_the_columns_of_a_batch_hold_the_sets_of_its_groups() -> None:
    """Two groups of two completions with 3 and 4 tokens; of the second group no sets are known."""
    ids = np.array([5, 9, 14, 3, 0, 21, 42], np.int32)
    texts: dict[str, Any] = {"completion_ids": ids, "completion_lengths": np.array([3, 4], np.int32)}
    plain = make_group(make_job(1), 0, **texts)
    sets = [np.unique([token, 7 * index]).astype(np.int32) for index, token in enumerate(ids)]
    group = make_group(make_job(1), 0, kept_tokens=pack([each.tobytes() for each in sets], ids), **texts)
    rows = rows_of([group, plain])
    assert len(rows) == 4
    batch = columns(rows, 6, torch.device("cpu"))
    assert batch[SIZES].shape == (4, 6) and batch[IDS].dtype == torch.int32
    assert not batch[SIZES][2:].any()
    mask = torch.zeros(4, 8).bool()  # TRL pads to a multiple, and masks a completion that was cut
    mask[0, :3] = mask[1, :4] = True
    found = Sets.of_batch(batch, mask)
    assert found.sizes.tolist() == [len(each) for each in sets]
    for each, expected, token in zip(found.ids.split(found.sizes.tolist()), sets, ids, strict=True):
        assert each[0] == token and sorted(each.tolist()) == expected.tolist()
    mask[0] = False
    assert Sets.of_batch(batch, mask).ids.tolist() == found.ids[int(found.sizes[:3].sum()) :].tolist()
