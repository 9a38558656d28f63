"""What changed from version to version, and where: the figures of `async-grpo delta stats` and `delta diff`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_grpo.deltas.chain import Chain, ChainFault, Entry
from async_grpo.deltas.delta import Weights

_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
EMBEDDINGS, REST = "embeddings", "rest"
DEFAULT_SPANS = (2, 8, 32)

Mask = NDArray[np.bool_]  # of a tensor: the elements that changed
_LABELLED = 24  # rows that each have a label


class Share(NamedTuple):
    """So many elements of so many changed."""

    changed: int
    size: int

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


def statistics(chain: Chain, spans: Iterable[int] = DEFAULT_SPANS) -> Statistics:
    """Walk over the chain. Needs memory for the weights twice, and once more for each of `spans`."""
    problems: list[ChainFault] = []
    steps: list[StepFigures] = []
    anchors: dict[int, tuple[int, Weights]] = {}  # span -> the version from which the next `span` are counted
    over: dict[int, list[float]] = {span: [] for span in spans}
    before: int | None = None
    was: Weights = {}
    masks: dict[str, Mask] = {}
    for entry, current in chain.walk(problems):
        version, weights = entry.header.version, {name: words.copy() for name, words in current.items()}
        for span, found in over.items():
            start, old = anchors.get(span, (version, weights))
            if version == start + span:
                found.append(1 - total(differences(old, weights).values()).value)
            if version >= start + span or span not in anchors:
                anchors[span] = version, weights
        changed: dict[str, Mask] = {}
        if before is not None and before == entry.header.before:
            changed = {name: was[name] != weights[name] for name in weights}
            steps.append(_figures(entry, weights, changed, masks))
        before, was, masks = version, weights, changed
    means = {span: float(np.mean(found)) for span, found in over.items() if found}
    return Statistics(steps=steps, unchanged_over=means, problems=list(map(str, problems)))


def differences(old: Weights, new: Weights) -> dict[str, Share]:
    """By tensor: the elements that differ."""
    return {name: Share(int(np.count_nonzero(old[name] != words)), words.size) for name, words in new.items()}


def total(shares: Iterable[Share]) -> Share:
    """The elements of several tensors."""
    found = list(shares)
    return Share(sum(share.changed for share in found), sum(share.size for share in found))


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


def _figures(entry: Entry, weights: Weights, masks: Mapping[str, Mask], before: Mapping[str, Mask]) -> StepFigures:
    shares = {name: Share(int(np.count_nonzero(mask)), mask.size) for name, mask in masks.items()}
    common = sum(int(np.count_nonzero(masks[name] & mask)) for name, mask in before.items())
    either = sum(int(np.count_nonzero(masks[name] | mask)) for name, mask in before.items())
    return StepFigures(
        version=entry.header.version,
        span=entry.header.span,
        is_snapshot=entry.header.is_snapshot,
        file_bytes=entry.nbytes,
        weights_bytes=sum(words.nbytes for words in weights.values()),
        unchanged=1 - total(shares.values()).value,
        by_layer=_grouped(shares, layer_of),
        by_kind=_grouped(shares, kind_of),
        jaccard=common / either if either else None,
    )


def _grouped(shares: Mapping[str, Share], group_of: Callable[[str], str]) -> dict[str, float]:
    groups: defaultdict[str, list[Share]] = defaultdict(list)
    for name, share in shares.items():
        groups[group_of(name)].append(share)
    return {group: total(found).value for group, found in groups.items()}


def _rows(groups: Iterable[Mapping[str, float]]) -> list[str]:
    names = dict.fromkeys(name for group in groups for name in group)
    first: Callable[[str], tuple[int, int]] = lambda name: (  # noqa: E731
        {EMBEDDINGS: 0, REST: 2}.get(name, 1),
        int(name) if name.isdecimal() else 0,
    )
    return sorted(names, key=first)


def draw(statistics: Statistics, path: Path, *, title: str) -> None:
    """Heat maps of layers and of kinds of matrices over some versions, and the share that stays, as one picture."""
    from matplotlib.figure import Figure

    layers, kinds = statistics.layers, statistics.kinds
    heights = [max(3.0, 0.24 * len(layers)), max(2.4, 0.24 * len(kinds)), 2.0]
    figure = Figure(figsize=(11, sum(heights) + 2.2), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1, height_ratios=heights, sharex=True)
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    by_layer, by_kind = ([getattr(step, by) for step in statistics.steps] for by in ("by_layer", "by_kind"))
    highest = max(value for shares in (*by_layer, *by_kind) for value in shares.values())
    for axes, rows, shares, what in ((top, layers, by_layer, "layer"), (middle, kinds, by_kind, "kind of matrix")):
        image = _map(axes, statistics.steps, rows, shares, highest)
        axes.set_ylabel(what)
    bar = figure.colorbar(image, ax=[top, middle], aspect=40, pad=0.01)
    bar.set_label("share of the elements that changed")
    _lines(bottom, statistics)
    figure.align_ylabels()
    figure.savefig(path, dpi=130)


def _map(
    axes: Any,
    steps: Sequence[StepFigures],
    rows: Sequence[str],
    shares: Sequence[Mapping[str, float]],  # of each step
    highest: float,
) -> Any:
    table = np.array([[of_step.get(row, np.nan) for of_step in shares] for row in rows])
    edges = [steps[0].version - steps[0].span, *(step.version for step in steps)]
    image = axes.pcolormesh(edges, np.arange(len(rows) + 1), table, cmap="viridis", vmin=0, vmax=highest or 1)
    every = -(-len(rows) // _LABELLED)
    axes.set_yticks(np.arange(0, len(rows), every) + 0.5, list(rows)[::every], fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.set_frame_on(False)
    return image


def _lines(axes: Any, statistics: Statistics) -> None:
    versions = [step.version for step in statistics.steps]
    axes.plot(versions, [step.unchanged for step in statistics.steps], color="#0969da", label="elements unchanged")
    jaccard = [np.nan if step.jaccard is None else step.jaccard for step in statistics.steps]
    axes.plot(versions, jaccard, color="#bc4c00", label="Jaccard of what changes, with the version before")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("version")
    axes.legend(frameon=False, fontsize=8, loc="best")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
