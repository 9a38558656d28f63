"""Our log-probabilities in place of TRL's Triton kernel, against torch written out."""

from __future__ import annotations

import pytest
import torch

from async_grpo.setup.trl_compat import TorchLogProbs

N, H, V = 7, 5, 11
ALL = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(N, H, requires_grad=True),
        "weight": torch.randn(V, H, requires_grad=True),
        "bias": torch.randn(V, requires_grad=True),
        "targets": torch.randint(V, (N,)),
    }


def logits_by_hand(
    inputs: dict[str, torch.Tensor], temperature: float, softcap: float | None, scale: float, bias: bool
) -> torch.Tensor:
    logits = inputs["hidden"] @ inputs["weight"].T + inputs["bias"] * bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def of_targets(logits: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.log_softmax(logits.float(), -1).gather(1, inputs["targets"][:, None])[:, 0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.5)])
def test_values_and_gradients(
    inputs: dict[str, torch.Tensor], temperature: float, scale: float, softcap: float | None, bias: bool
) -> None:
    leaves = [inputs["hidden"], inputs["weight"]] + ([inputs["bias"]] if bias else [])
    weights = torch.arange(1.0, N + 1)  # so that each row's gradient counts

    logits = logits_by_hand(inputs, temperature, softcap, scale, bias)
    expected = of_targets(logits, inputs)
    probabilities = torch.softmax(logits, -1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    expected_gradients = torch.autograd.grad((weights * (expected + 0.1 * entropy)).sum(), leaves)

    head = (inputs["hidden"], inputs["weight"], inputs["bias"] if bias else None)
    ours = TorchLogProbs.apply(*head, inputs["targets"], temperature, 3, softcap, scale, ALL)
    logprobs, our_entropy, log_sum_sq, mean_logits, is_top1 = ours
    gradients = torch.autograd.grad((weights * (logprobs + 0.1 * our_entropy)).sum(), leaves)

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(our_entropy, entropy)
    torch.testing.assert_close(log_sum_sq, probabilities.square().sum(-1).log())
    torch.testing.assert_close(mean_logits, logits.mean(-1))
    assert torch.equal(is_top1, logits.argmax(-1) == inputs["targets"])
    torch.testing.assert_close(gradients, expected_gradients)
    assert not log_sum_sq.requires_grad and not mean_logits.requires_grad, "statistics take no part in the loss"


def test_only_what_is_asked_for_is_computed(inputs: dict[str, torch.Tensor]) -> None:
    logprobs, *statistics = TorchLogProbs.apply(inputs["hidden"], inputs["weight"], None, inputs["targets"], 1.0, 256)
    assert logprobs.shape == (N,)
    assert statistics == [None] * 4


def test_half_precision_is_summed_up_in_single(inputs: dict[str, torch.Tensor]) -> None:
    hidden, weight = inputs["hidden"].bfloat16(), inputs["weight"].bfloat16()
    logprobs, entropy, *_ = TorchLogProbs.apply(hidden, weight, None, inputs["targets"], 1.0, 256, outputs=ALL)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(logprobs, of_targets(hidden @ weight.T, inputs))


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_another_precision_is_cast_to_that_of_the_states(inputs: dict[str, torch.Tensor], bias: bool) -> None:
    """Mamba-2 in bf16 with its norm in fp32 hands fp32 to a head in bf16; TRL's kernel multiplies in fp32."""
    weight, offset = inputs["weight"].bfloat16(), inputs["bias"].bfloat16() if bias else None
    logprobs, *_ = TorchLogProbs.apply(inputs["hidden"], weight, offset, inputs["targets"], 1.0, 256)
    logits = inputs["hidden"] @ weight.float().T + (offset.float() if offset is not None else 0)
    torch.testing.assert_close(logprobs, of_targets(logits, inputs))


def test_under_autocast_all_of_the_product_is_of_its_precision(inputs: dict[str, torch.Tensor]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logprobs, *_ = TorchLogProbs.apply(inputs["hidden"], inputs["weight"], None, inputs["targets"], 1.0, 256)
    logits = inputs["hidden"].bfloat16() @ inputs["weight"].bfloat16().T
    torch.testing.assert_close(logprobs, of_targets(logits, inputs))
