"""What a head's numbers add to the log-probabilities of the candidates: o in q(a|s) ∝ π(a|s)·exp(o(sa)).

The target is max E_q[R] − η KL(q‖π), whose optimum has o(sa) = log E_π[exp(z/η) | sa], z being the return. η has the
unit of the reward, as in the papers: Q# (arXiv 2502.20548), PITA (arXiv 2507.20067).

K is 1 for heads of one number l, of which p = σ(l); else the number of atoms.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from async_grpo.errors import UsageError

LEAST_P: Final = 1e-9  # of `expectation`, whose logarithm has no bound
DISABLED: Final = "disabled"
MODES: Final[dict[str, tuple[str, ...]]] = {  # by the loss that the head was trained with; the first is the default
    "mle": ("histogram", "expectation", "contrastive"),
    "bce": ("bernoulli", "log_odds", "expectation", "contrastive"),
    "mse": ("bernoulli", "log_odds", "expectation", "contrastive"),
    "bradley_terry": ("log_odds",),  # its numbers are known up to a constant
}


def offsets(
    mode: str,
    logits: Tensor,
    *,
    eta: float,
    levels: Tensor | None = None,
    v_min: float = 0.0,
    v_max: float = 1.0,
    beta: float = 1.0,
) -> Tensor:
    """Compute o(sa) of each candidate, in nats.

    Args:
        mode: `bernoulli` is exact for returns that are `v_min` or `v_max`, `histogram` for those on the levels,
            `log_odds` for preferences by Bradley–Terry at the last token. `expectation` is log E[z] scaled to
            [0, 1], the limit η → 0; `contrastive` is E[z]/η, the baseline CD.
        logits: [..., K], of the head.
        eta: η, in units of the reward.
        levels: [K], the returns that the atoms stand for.
        beta: of Bradley–Terry.

    Returns:
        [...], finite for finite logits.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if mode == "histogram":
        assert levels is not None
        return torch.logsumexp(torch.log_softmax(logits, dim=-1) + (levels.to(logits) - v_min) / eta, dim=-1)
    if mode == "bernoulli":
        one = logits[..., 0]  # log(1 − p + p·e^{1/η}), without the difference of two large numbers
        return torch.logaddexp(logsigmoid(-one), logsigmoid(one) + (v_max - v_min) / eta)
    if mode == "log_odds":
        return logits[..., 0] / (beta * eta)
    if mode == "expectation":
        return _share(logits, levels, v_min, v_max).clamp_min(LEAST_P).log()
    assert mode == "contrastive", mode
    return _share(logits, levels, v_min, v_max) * ((v_max - v_min) / eta)


def centred(offsets: Tensor) -> Tensor:
    """Subtract the row's smallest offset, so that a token without a score, and so with 0, counts as the worst one."""
    return offsets - offsets.amin(dim=-1, keepdim=True)


def check_mode(mode: str, loss: str) -> None:
    """Refuse a mode that the numbers of such a head are not made for, with `UsageError`."""
    if mode != DISABLED and mode not in MODES[loss]:
        raise UsageError(
            f"mode {mode!r} cannot take a head that was trained with {loss}. Take one of "
            f"{', '.join((*MODES[loss], DISABLED))}, or another head."
        )


def _share(logits: Tensor, levels: Tensor | None, v_min: float, v_max: float) -> Tensor:
    """The expected return, scaled to [0, 1]."""
    if logits.shape[-1] == 1:
        return torch.sigmoid(logits[..., 0])
    assert levels is not None
    shares = (levels.to(logits) - v_min) / (v_max - v_min)
    return (torch.softmax(logits, dim=-1) * shares).sum(dim=-1)
