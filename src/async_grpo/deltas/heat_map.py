"""Pictures of a chain: where it changes and when, and how much of it stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from async_grpo.deltas.statistics import Statistics, StepFigures

_LABELLED = 24  # rows that each have a label


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
