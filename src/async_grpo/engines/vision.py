"""What a model computes the images of a batch from: the fields of its groups, for the rows that are asked for.

B rows are decoded, L tokens is the longest prompt, left-padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from async_grpo.engines import Fields, PreparedGroup

_LARGE = "pixel_values"  # begins the names of what only a forward pass needs


class VisionInputs:
    """Model inputs besides token ids, as TRL gives them to `generate` of transformers."""

    def __init__(self, groups: Sequence[PreparedGroup], longest: int, device: torch.device) -> None:
        self._parts = [part for group in groups for part in _parts(group)]
        self._longest, self._device = longest, device
        self.names = {name for fields, _ in self._parts for name in fields}
        self.selectable = all(len(prompts) == 1 for _, prompts in self._parts)

    @property
    def keys_B(self) -> Tensor:  # a shape
        """The same number for neighbouring rows with the same images."""
        keys, before = [-1], None
        for fields, prompts in self._parts:
            keys += [keys[-1] + (fields is not before)] * len(prompts)
            before = fields
        return torch.tensor(keys[1:], dtype=torch.long, device=self._device)

    def small(self) -> dict[str, Tensor]:
        """The tensors of all rows that positions are computed from."""
        return self._merged(self._parts, {name for name in self.names if not name.startswith(_LARGE)}, more_tokens=0)

    def of_rows(self, rows: Tensor | None = None, *, more_tokens: int = 0) -> dict[str, Tensor]:
        """Tensors of these rows, for a forward pass over their prompts and `more_tokens`; all rows where it is None."""
        parts = self._parts if rows is None else [self._parts[row] for row in rows.tolist()]
        return self._merged(parts, self.names, more_tokens)

    def _merged(self, parts: Sequence[_Part], names: set[str], more_tokens: int) -> dict[str, Tensor]:
        merged: dict[str, Tensor] = {}
        for name in sorted(names):
            values = [fields[name] for fields, _ in parts if name in fields]
            if values and isinstance(values[0], Tensor):
                merged[name] = torch.cat(values).to(self._device)
            elif values:
                rows = [row for part in parts for row in _per_token(name, *part)]
                padded = [[0] * (self._longest - len(row)) + row + [0] * more_tokens for row in rows]
                merged[name] = torch.tensor(padded, dtype=torch.long, device=self._device)
        return merged


_Part = tuple[Fields, Sequence[list[int]]]  # fields, and the prompts that they are of


def _parts(group: PreparedGroup) -> list[_Part]:
    if not group.fields:
        return [({}, [ids]) for ids in group.prompt_ids]
    size = len(group.prompt_ids) // len(group.fields)
    return [(fields, group.prompt_ids[at * size : (at + 1) * size]) for at, fields in enumerate(group.fields)]


def _per_token(name: str, fields: Fields, prompts: Sequence[list[int]]) -> list[list[int]]:
    """One number for each token of the prompts; 0 where the processor said nothing: it has no image."""
    given: Any = fields.get(name)
    return [list(row) for row in given] if given is not None else [[0] * len(ids) for ids in prompts]
