"""Decoding that follows a value head: a small model scores the candidates of the next token, and its score is added.

The policy's weights stay as they are. A head is a folder (`head`); `offsets` makes numbers for the logits of what it
says, `processor` computes them while tokens are sampled, `setup` gives them to a setup file's trainer, and `divergence`
measures how far the result is from the reference. What a head is trained on and how is in `algorithms`. Start with
`head`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_grpo_experiments.guidance.head import HeadRecord, ValueHead
    from async_grpo_experiments.guidance.processor import Guidance
    from async_grpo_experiments.guidance.setup import guided

__all__ = ["Guidance", "HeadRecord", "ValueHead", "guided"]

_HOMES = {"Guidance": "processor", "HeadRecord": "head", "ValueHead": "head", "guided": "setup"}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
