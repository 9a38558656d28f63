"""Parts of transformers' models by fewer kernels: in a CUDA graph each of them takes time, however little it computes.

What replaces a part is tried against it first. In half precision it rounds less often than the part.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

ROTATION = "apply_rotary_pos_emb"  # in the modules of transformers' models
Replacement = tuple[Any, str, Callable[..., Any]]  # a module, a name in it, and what that is in a pass


def replacements(model: nn.Module) -> list[Replacement]:
    """Return what computes the same as parts of this model, by a trial of one part of each kind."""
    norms = [it for it in model.modules() if type(it).__name__.endswith("RMSNorm") and "forward" not in vars(it)]
    alike = {kind: _is_plain(norm) for kind, norm in {type(it): it for it in norms}.items()}
    modules = {sys.modules.get(type(it).__module__) for it in model.modules()}
    return [
        *((norm, "forward", partial(_normed, norm)) for norm in norms if alike[type(norm)]),
        *((it, ROTATION, partial(_rotated, own)) for it in modules if _rotates(own := getattr(it, ROTATION, None))),
    ]


@contextmanager
def replaced(parts: Sequence[Replacement]) -> Iterator[None]:
    """Replace these parts inside the block."""
    with ExitStack() as then:
        for owner, name, by in parts:
            own = vars(owner).get(name)
            then.callback(*((delattr, owner, name) if own is None else (setattr, owner, name, own)))
            setattr(owner, name, by)
        yield


def _is_plain(norm: Any) -> bool:
    try:
        hidden = torch.linspace(-2, 3, norm.weight.numel(), dtype=norm.weight.dtype, device=norm.weight.device)
        for mine in (hidden, hidden.bfloat16()) if hidden.dtype == torch.float32 else (hidden,):
            within = 8 * torch.finfo(mine.dtype).eps
            torch.testing.assert_close(_normed(norm, mine), norm.forward(mine), rtol=within, atol=within)
    except Exception:  # noqa: BLE001  # it has other numbers, or takes or adds others, or is of a model's own code
        return False
    return True


def _normed(norm: Any, hidden: Tensor) -> Tensor:
    """One kernel on CUDA, and a cast in mixed precision, where the module's own are six to eight."""
    if torch.promote_types(hidden.dtype, norm.weight.dtype) != norm.weight.dtype:
        return type(norm).forward(norm, hidden)
    with torch.autocast(hidden.device.type, enabled=False):  # torch 2.13 would compute in float32
        return rms_norm(hidden.to(norm.weight.dtype), norm.weight.shape, norm.weight, norm.variance_epsilon)


def _rotates(rotate: Any) -> bool:
    if rotate is None or [*inspect.signature(rotate).parameters] != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    numbers = torch.linspace(-2, 3, 40, dtype=torch.float32, device="cpu")
    q, k, cos, sin = torch.split(numbers.view(5, 1, 8), [2, 1, 1, 1])
    try:
        for it in (torch.float32, torch.bfloat16):
            given = q[None].to(it), k[None].to(it), cos, sin
            torch.testing.assert_close(_rotated(rotate, *given), rotate(*given))
    except Exception:  # noqa: BLE001  # as above
        return False
    return True


def _rotated(rotate: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Sequence[Tensor]:
    """Queries and keys together by four kernels, where the function has five for each."""
    width = q.shape[-1]
    if cos.shape[-1] != width:  # a part of each head is rotated
        return rotate(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    both = torch.cat((q, k), dim=unsqueeze_dim)
    rotated = both * cos
    rotated[..., : width // 2].addcmul_(both[..., width // 2 :], sin[..., : width // 2], value=-1)
    rotated[..., width // 2 :].addcmul_(both[..., : width // 2], sin[..., width // 2 :])
    return torch.split(rotated, [q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]], dim=unsqueeze_dim)
