"""Cells of `edge.py` in its JSON file, their tables and plot, and how many of the runs were warned of."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import inf, sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.table import describe_machine, machine_line

from async_grpo.formatting import counted
from async_grpo.training.corrections.tipping import Tipping

PLAIN = "plain"
TOLERANCE = 0.05  # below the best of plain TRL: what a rate that is borne may cost
TITLES = {"reverse": "12 letters, written backwards", "sums": "the demo's sums"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One training run."""

    task: str
    column: str
    staleness: int
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.task}, {self.rate:g}, {self.row}, seed {self.seed}"

    @property
    def row(self) -> Row:
        return Row(column=self.column, staleness=self.staleness)


@dataclass(frozen=True, slots=True, order=True)
class Row:
    """What a table compares."""

    staleness: int
    column: str

    def __str__(self) -> str:
        if self.column == PLAIN:
            return "plain TRL"
        return f"K = {self.staleness}, `{self.column}`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    cell: Cell
    accuracies: list[float]  # after each of the measured steps
    seconds: float  # of CPU
    series: dict[str, list[float]]  # figures of each step

    @property
    def warned_at(self) -> int | None:
        """The step of the warning that the run tips."""
        tipping = Tipping()
        figures = zip(self.series.get("ess_token", ()), self.series.get("kl", ()), strict=True)
        return next((step for step, (share, kl) in enumerate(figures, start=1) if tipping.tips(share, kl)), None)


# --- The file ---------------------------------------------------------------------------------------------


def read(path: Path | None) -> list[Outcome]:
    if path is None or not path.exists():
        return []
    cells = json.loads(path.read_text())["cells"]
    return [Outcome(**{**entry, "cell": Cell(**entry["cell"])}) for entry in cells]


def write(path: Path | None, done: Sequence[Any]) -> None:
    """One cell a line; the file appears whole."""
    if path is None:
        return
    lines = ",\n".join(json.dumps(asdict(outcome)) for outcome in done)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(f'{{"machine": {json.dumps(describe_machine())}, "cells": [\n{lines}\n]}}\n')
    unfinished.replace(path)


# --- Tables -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figure:
    """The accuracy of several seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return mean(self.values)

    @property
    def error(self) -> float:
        """The standard error; infinite of one seed."""
        return stdev(self.values) / sqrt(len(self.values)) if len(self.values) > 1 else inf

    def __str__(self) -> str:
        spread = f" ± {self.error:.3f}" if self.error < inf else ""
        return f"{self.mean:.3f}{spread} ({len(self.values)})".replace("0.", ".")

    def is_below(self, other: Figure) -> bool:
        """By more than two standard errors of the difference."""
        return other.mean - self.mean > 2 * sqrt(self.error**2 + other.error**2)


Table = dict[Row, dict[float, Figure]]


def table_of(done: Sequence[Outcome], task: str) -> Table:
    values: dict[Row, dict[float, list[float]]] = {}
    for outcome in sorted(done, key=lambda one: one.cell.seed):
        if outcome.cell.task == task:
            rates = values.setdefault(outcome.cell.row, {})
            rates.setdefault(outcome.cell.rate, []).append(mean(outcome.accuracies))
    rows = sorted(values, key=lambda row: (row.column != PLAIN, row))
    return {row: {rate: Figure(tuple(them)) for rate, them in values[row].items()} for row in rows}


def tables(done: Sequence[Outcome]) -> str:
    """Markdown: a table of each task, the rows that the seeds separate from plain TRL, and the warnings."""
    parts = [f"{machine_line(describe_machine())}; {counted(len(done), 'run')}; mean ± standard error (seeds)."]
    for task, title in TITLES.items():
        if found := table_of(done, task):
            said = [*findings(found), *edges(found), *differences(done, task)]
            parts += [f"**{title.capitalize()}**", markdown(found), "\n".join(said)]
    return "\n\n".join([*parts, warnings(done)])


def markdown(table: Table) -> str:
    rates = sorted({rate for figures in table.values() for rate in figures})
    lines = [
        f"| | {' | '.join(map(short, rates))} |",
        "|" + "---|" * (1 + len(rates)),
    ]
    for row, figures in table.items():
        texts = (str(figures[rate]) if rate in figures else "" for rate in rates)
        lines.append(f"| {row} | {' | '.join(texts)} |")
    return "\n".join(lines)


def short(rate: float) -> str:
    """`4e-4`."""
    return f"{rate:.0e}".replace("e-0", "e-")


def findings(table: Table) -> Iterator[str]:
    """For each rate: the rows that are two standard errors below plain TRL."""
    for rate, plain in sorted(table.get(Row(0, PLAIN), {}).items()):
        there = {row: figures[rate] for row, figures in table.items() if row.column != PLAIN and rate in figures}
        several = {row: figure for row, figure in there.items() if figure.error < inf}
        below = [str(row) for row, figure in several.items() if figure.is_below(plain)]
        if several:
            told = "; ".join(below) if below else "none"
            told = f"two standard errors below plain TRL: {told}"
            yield f"- {short(rate)}, of {counted(len(several), 'row')} with several seeds: {told}."


def edges(table: Table) -> Iterator[str]:
    """Up to which rate plain TRL holds, and `bypass` at each staleness."""
    plain = table.get(Row(0, PLAIN), {})
    if len(plain) > 1:
        level = max(figure.mean for figure in plain.values()) - TOLERANCE
        rows = {row: figures for row, figures in table.items() if row.column in (PLAIN, "bypass")}
        told = "; ".join(f"{row} {up_to(figures, level)}" for row, figures in rows.items())
        yield f"- Up to this rate the accuracy is at most {TOLERANCE:g} below the best of plain TRL: {told}."


def differences(done: Sequence[Outcome], task: str) -> Iterator[str]:
    """For each rate: what the other rows have more than `bypass` at the same staleness, seed by seed."""
    accuracies = {outcome.cell: mean(outcome.accuracies) for outcome in done if outcome.cell.task == task}
    found: dict[float, dict[Row, list[float]]] = {}
    for cell, accuracy in sorted(accuracies.items(), key=lambda one: one[0].row):
        bypass = replace(cell, column="bypass")
        if cell.column not in (PLAIN, "bypass") and bypass in accuracies:
            found.setdefault(cell.rate, {}).setdefault(cell.row, []).append(accuracy - accuracies[bypass])
    for rate, rows in sorted(found.items()):
        told = [f"{row} {_signed(Figure(tuple(values)))}" for row, values in rows.items() if len(values) > 1]
        if told:
            yield f"- {short(rate)}, less `bypass` at the same K, paired by seed: {'; '.join(told)}."


def _signed(figure: Figure) -> str:
    return str(figure) if figure.mean < 0 else f"+{figure}"


def up_to(figures: dict[float, Figure], level: float) -> str:
    """The rate at which the mean falls below `level`; between two rates a straight line over the rate's logarithm."""
    rates = sorted(figures)
    for low, high in pairwise(rates):
        above, below = figures[low].mean, figures[high].mean
        if above >= level > below:
            return f"{low * (high / low) ** ((above - level) / (above - below)):.1e}".replace("e-0", "e-")
    return f"at least {short(rates[-1])}" if figures[rates[-1]].mean >= level else f"below {short(rates[0])}"


def warnings(done: Sequence[Outcome]) -> str:
    """How many runs were warned of, of those that ended near plain TRL (two deviations of a run), and of the others."""
    counts = {True: [0, 0], False: [0, 0]}
    for outcome in done:
        cell = outcome.cell
        plain = table_of(done, cell.task).get(Row(0, PLAIN), {}).get(cell.rate)
        if cell.column == PLAIN or plain is None or plain.error == inf:
            continue
        deviation = stdev(plain.values)  # of one run
        well = mean(outcome.accuracies) >= plain.mean - 2 * max(deviation, plain.error)
        counts[well][0] += outcome.warned_at is not None
        counts[well][1] += 1
    good, bad = counts[True], counts[False]
    return (
        f"The run says that it tips in {good[0]} of the {good[1]} runs that end within two standard deviations of a "
        f"run of plain TRL, and in {bad[0]} of the {bad[1]} others."
    )


# --- Plot -------------------------------------------------------------------------------------------------

COLOURS = {0: "#666666", 1: "#56B4E9", 2: "#0072B2", 4: "#E69F00", 8: "#D55E00"}


def draw(done: Sequence[Outcome], path: Path) -> None:
    """Accuracy over the learning rate, a curve for each staleness: `bypass`, and GSPO."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tasks = [task for task in TITLES if len({outcome.cell.rate for outcome in done if outcome.cell.task == task}) > 1]
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(4.6 * len(tasks), 4), dpi=150, squeeze=False)
    for axes, task in zip(panels[0], tasks, strict=True):
        for row, figures in table_of(done, task).items():
            if row.column in (PLAIN, "bypass", "GSPO"):
                _curve(axes, row, figures)
        axes.set(title=TITLES[task], xscale="log", xlabel="learning rate", ylabel="probability of the right answer")
        rates = sorted({outcome.cell.rate for outcome in done if outcome.cell.task == task})
        axes.set_xticks(rates, map(short, rates))
        axes.minorticks_off()
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _curve(axes: Any, row: Row, figures: dict[float, Figure]) -> None:
    rates = sorted(figures)
    axes.errorbar(
        rates,
        [figures[rate].mean for rate in rates],
        yerr=[figures[rate].error if figures[rate].error < inf else 0 for rate in rates],
        label=str(row).replace("`", "").replace(", bypass", ""),
        color="#000000" if row.column == PLAIN else COLOURS[row.staleness],
        linestyle=":" if row.column == PLAIN else "-",
        markerfacecolor="white" if row.column == "GSPO" else None,
        marker="o",
        markersize=4,
        capsize=2,
    )
