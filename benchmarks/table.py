"""What the benchmarks of training share: rows with targets, intervals, and figures that go into the documentation."""

from __future__ import annotations

import json
import math
import operator
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.control import why_unmeasurable

ROOT = Path(__file__).resolve().parents[1]
STUDENT_T_975 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # by degrees of freedom


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure: what it should be, whether it is, and the most that could be reached."""

    name: str
    value: float
    unit: str
    limit: float | None = None  # the best possible value on this machine, where it can be computed
    target: str = ""  # e.g. ">= 1.5"
    ok: bool | None = None  # None: a figure without a target
    spread: tuple[float, float, float]  # min, median, max
    note: str = ""
    unmeasurable: str = ""  # why the value says nothing: it is not shown as a figure


def row(
    name: str, values: Sequence[float], unit: str, *, target: str = "", controls: Sequence[float] = (), **more: Any
) -> Row:
    """A row whose value is the median, held against `target`, e.g. `"<= 3"`.

    Args:
        controls: seconds of equal work that was done between the measurements.
    """
    middle = statistics.median(values)
    ok = meets(middle, target) if target and "ok" not in more else more.pop("ok", None)
    why = why_unmeasurable(values, controls, more.get("limit"), target)
    spread = (min(values), middle, max(values))
    return Row(
        name=name,
        value=middle,
        unit=unit,
        target=target,
        ok=None if why else ok,
        spread=spread,
        unmeasurable=why,
        **more,
    )


def meets(value: float, target: str) -> bool:
    sign, bound = target.split()
    compare = {">=": operator.ge, "<=": operator.le, "<": operator.lt}[sign]
    return bool(compare(value, float(bound)))


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% confidence interval (Student's t)."""
    if len(values) < 2:
        return values[0], math.inf
    half = STUDENT_T_975[len(values) - 1] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.mean(values), half


HEAD = ("what", "value", "limit", "target", "ok", "min .. median .. max")


def cells(one: Row) -> tuple[str, ...]:
    if one.unmeasurable:
        return one.name, "not measurable here", "", one.target, "", one.unmeasurable
    low, middle, high = one.spread
    verdict = "" if one.ok is None else "yes" if one.ok else "no"
    limit = "" if one.limit is None else figure(one.limit)
    spread = f"{figure(low)} .. {figure(middle)} .. {figure(high)}"
    return one.name, f"{figure(one.value)} {one.unit}".strip(), limit, one.target, verdict, spread


def figure(value: float) -> str:
    """Three digits, or all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def as_text(rows: Iterable[Row]) -> str:
    return "\n".join(line(cells(one)) + (f"\n    {one.note}" if one.note else "") for one in rows)


def line(texts: Sequence[str]) -> str:
    what, value, limit, target, ok, spread = texts
    return f"{what:<66} {value:>19} {limit:>7} {target:>9} {ok:>4}  {spread}"


def as_markdown(rows: Iterable[Row]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    return "\n".join([*lines, *(f"| {' | '.join(cells(one))} |" for one in rows)])


def describe_machine() -> dict[str, Any]:
    models = [text for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if "model name" in text]
    return {
        "cpu": models[0].split(":")[1].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
    }


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gb']} GB, torch {machine['torch']}, "
        f"Python {machine['python']}"
    )


def write_json(path: Path, rows: Iterable[Row], **more: Any) -> None:
    content = {"machine": describe_machine(), "rows": [asdict(one) for one in rows], **more}
    path.write_text(json.dumps(content, indent=1) + "\n")


def with_earlier(path: Path, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of an earlier run in this file: new rows replace those of their names, others are appended."""
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    return [*({one["name"]: Row(**one) for one in earlier} | {one.name: one for one in rows}).values()]


def keep(name: str, path: Path, measured: Iterable[Row], *, in_docs: bool, **more: Any) -> None:
    """Write what was measured into the file, beside earlier rows, and with `in_docs` all of them into docs/."""
    rows = with_earlier(path, measured)
    write_json(path, rows, **more)
    if in_docs:
        update_docs(name, f"Machine: {machine_line(describe_machine())}.\n\n{as_markdown(rows)}")


def update_docs(name: str, text: str) -> list[Path]:
    """Put `text` between `<!-- begin: NAME -->` and `<!-- end: NAME -->`, wherever docs/ has these marks."""
    block = re.compile(rf"(<!-- begin: {re.escape(name)} -->\n).*?(<!-- end: {re.escape(name)} -->)", re.DOTALL)
    changed = []
    for path in sorted((ROOT / "docs").glob("*.md")):
        content = path.read_text(encoding="utf-8")
        filled = block.sub(lambda found: f"{found[1]}{text.strip()}\n{found[2]}", content)
        if filled != content:
            path.write_text(filled, encoding="utf-8")
            changed.append(path)
    return changed
