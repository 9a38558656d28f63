"""Which model and which tokenizer a head's values are of: both are compared before anything is decoded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

SAMPLE = 64  # numbers of each parameter


def vocabulary_of(tokenizer: Any) -> list[str | None]:
    """The tokens by id, None for an id without one. Rows that pad the embedding are not among them."""
    ids = getattr(tokenizer, "tokenizer", tokenizer).get_vocab()  # a processor has its tokenizer in it
    tokens: list[str | None] = [None] * (max(ids.values()) + 1)
    for token, index in ids.items():
        tokens[index] = token
    return tokens


def digest_of(tokens: Sequence[str | None]) -> str:
    """SHA-256 of the tokens by id, hexadecimal."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """SHA-256 of the names and shapes of the parameters and of evenly spaced numbers of each, hexadecimal.

    A whole hash would take seconds, and workers ask at every batch, as weights may change between two. So it finds the
    wrong model, and one that was trained on; it is no proof that all numbers are the same. They are rounded to bfloat16
    first, so that one model has one digest, whether it is loaded in bfloat16 or float32.
    """
    digest, sampled = hashlib.sha256(), []
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            flat = parameter.detach().flatten()
            sampled.append(flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].to(torch.bfloat16))
        digest.update(torch.cat(sampled).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
