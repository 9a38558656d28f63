"""What changed from version to version, and where: the figures of `async-grpo delta stats` and `delta diff`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_grpo.deltas.chain import Chain, ChainFault, Step
from async_grpo_ipc.delta import Buffers

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
EMBEDDINGS, REST = "embeddings", "rest"
DEFAULT_SPANS = (2, 8, 32)


@dataclass(slots=True)
class Share:
    """So many elements of so many changed."""

    changed: int = 0
    size: int = 0

    def add(self, changed: int, size: int) -> None:
        self.changed += changed
        self.size += size

    @property
    def value(self) -> float:
        return self.changed / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """One version against the one before it in the chain."""

    version: int
    span: int  # optimizer steps
    is_snapshot: bool
    file_bytes: int
    weights_bytes: int
    unchanged: float  # share of all elements
    by_layer: dict[str, float]  # share of elements that changed
    by_kind: dict[str, float]
    jaccard: float | None  # of the elements that changed, with those of the version before; None: nothing changed


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """All versions of a chain that could be rebuilt."""

    steps: list[StepFigures]
    unchanged_over: dict[int, float]  # versions k -> mean share of elements that are equal k versions later
    problems: list[str] = field(default_factory=list)

    @property
    def layers(self) -> list[str]:
        return _rows(step.by_layer for step in self.steps)

    @property
    def kinds(self) -> list[str]:
        return _rows(step.by_kind for step in self.steps)


@dataclass(slots=True)
class _Anchor:
    """The weights from which the next `span` versions are counted."""

    span: int
    version: int = -1
    buffers: Buffers | None = None
    found: list[float] = field(default_factory=list)

    def look(self, version: int, buffers: Buffers) -> None:
        if self.buffers is not None and version == self.version + self.span:
            total = Share()
            for name, buffer in buffers.items():
                total.add(int(np.count_nonzero(_changed(self.buffers, buffers, name))), len(buffer.words))
            self.found.append(1 - total.value)
        if self.buffers is None or version >= self.version + self.span:
            self.version, self.buffers = version, buffers


def statistics(chain: Chain, spans: Iterable[int] = DEFAULT_SPANS) -> Statistics:
    """Walk over the chain. Needs memory for the weights twice, and once more for each of `spans`."""
    problems: list[ChainFault] = []
    anchors = [_Anchor(span) for span in spans]
    steps: list[StepFigures] = []
    before: Step | None = None
    masks: dict[str, NDArray[np.bool_]] = {}
    for step in chain.walk(problems=problems, in_place=False):
        for anchor in anchors:
            anchor.look(step.entry.version, step.buffers)
        if before is not None and before.entry.version == step.entry.place.before:
            found = {name: _changed(before.buffers, step.buffers, name) for name in step.buffers}
            steps.append(_figures(step, found, masks))
            masks = found
        else:
            masks = {}
        before = step
    over = {anchor.span: float(np.mean(anchor.found)) for anchor in anchors if anchor.found}
    return Statistics(steps=steps, unchanged_over=over, problems=list(map(str, problems)))


def differences(old: Buffers, new: Buffers) -> dict[str, Share]:
    """By tensor: the elements that differ."""
    found = {}
    for name, buffer in new.items():
        found[name] = Share(int(np.count_nonzero(_changed(old, new, name))), len(buffer.words))
    return found


def layer_of(name: str) -> str:
    """`12` for what is in layer 12, and names for what is before and after the layers."""
    match = _LAYER.search(name)
    if match is not None:
        return match[1]
    return EMBEDDINGS if "embed" in name or ".wte" in name or ".wpe" in name else REST


def kind_of(name: str) -> str:
    """`q_proj` for `model.layers.3.self_attn.q_proj.weight`; adapters and biases are kinds of their own."""
    parts = [part for part in name.split(".") if part not in ("weight", "default")]
    return ".".join(parts[-2:]) if len(parts) > 1 and (parts[-1] == "bias" or "lora" in parts[-1]) else parts[-1]


def _figures(
    step: Step, masks: Mapping[str, NDArray[np.bool_]], before: Mapping[str, NDArray[np.bool_]]
) -> StepFigures:
    total, common, either = Share(), 0, 0
    layers: defaultdict[str, Share] = defaultdict(Share)
    kinds: defaultdict[str, Share] = defaultdict(Share)
    for name, mask in masks.items():
        changed = int(np.count_nonzero(mask))
        for share in (total, layers[layer_of(name)], kinds[kind_of(name)]):
            share.add(changed, mask.size)
        if before:
            common += int(np.count_nonzero(mask & before[name]))
            either += int(np.count_nonzero(mask | before[name]))
    return StepFigures(
        version=step.entry.version,
        span=step.entry.place.span,
        is_snapshot=step.entry.is_snapshot,
        file_bytes=step.entry.header.file_bytes,
        weights_bytes=sum(buffer.nbytes for buffer in step.buffers.values()),
        unchanged=1 - total.value,
        by_layer={name: share.value for name, share in layers.items()},
        by_kind={name: share.value for name, share in kinds.items()},
        jaccard=common / either if either else None,
    )


def _changed(old: Buffers, new: Buffers, name: str) -> NDArray[np.bool_]:
    found: NDArray[Any] = old[name].words != new[name].words
    return found


def _rows(groups: Iterable[Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for group in groups for name in group)
    first: Callable[[str], tuple[int, int]] = lambda name: (  # noqa: E731
        {EMBEDDINGS: 0, REST: 2}.get(name, 1),
        int(name) if name.isdecimal() else 0,
    )
    return sorted(names, key=first)
