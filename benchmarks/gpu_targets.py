"""What has to be reached on a GPU, and what was: a Markdown table from the JSON files of `scripts/gpu_check.sh`.

python benchmarks/gpu_targets.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.table import meets


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`rows`: the beginnings of the names of the rows that are held against it; the worst one counts."""

    what: str
    target: str
    unit: str
    file: str
    rows: tuple[str, ...]
    flat: bool = True  # of weights: only what was flattened
    of: str = ""  # in the name: the size that is judged, where a smaller one shows what surrounds it


TARGETS = (
    Target(
        what="publish", target=">= 0.85", unit="of raw copy", file="gpu_weights.json", rows=("publish,",), of="1B fp32"
    ),
    Target(
        what="pull",
        target=">= 0.85",
        unit="of raw copy",
        file="gpu_weights.json",
        rows=("pull,",),
        of="1B fp32",
    ),
    Target(what="adopt 400 tensors", target="<= 1", unit="ms", file="gpu_weights.json", rows=("adopt",)),
    Target(what="attach", target="<= 50", unit="ms", file="gpu_weights.json", rows=("attach",), flat=False),
    Target(
        what="one more aliasing worker, from a loaded model",
        target="<= 3",
        unit="% of model",
        file="gpu_weights.json",
        rows=("memory of an aliasing worker",),
        flat=False,
        of="1B",
    ),
    Target(
        what="server and 2 aliasing workers against TRL alone, transformers",
        target=">= 1.7",
        unit="of its rollouts/s",
        file="gpu_async.json",
        rows=("2 workers against",),
        flat=False,
    ),
    *(
        Target(what=what, target=target, unit=unit, file="gpu_one_gpu.json", rows=(rows,), flat=False)
        for what, target, unit, rows in (
            ("a worker alone, 512 completions", ">= 0.5", "of the limit", "worker alone, 512 rows"),
            ("a worker alone, 64 completions", ">= 0.35", "of the limit", "worker alone, 64 rows"),
            ("a step of a server and 1 worker, in turns", ">= 0.35", "of the limit", "server and 1 worker"),
            ("server and 1 worker against TRL with `generate`", ">= 3", "x TRL", "server and 1 worker"),
        )
    ),
    Target(
        what="vLLM in the worker against `LLM.generate`",
        target=">= 0.95",
        unit="×",
        file="gpu_vllm.json",
        rows=("",),
        flat=False,
        of="our worker against plain vLLM",
    ),
)
ELSEWHERE = (
    "| `generate` with 2, 4 and 8 GPUs against one | >= 1.8, 3.5, 6.5 | not run | "
    "`benchmarks/experiments.py --only generation`, where there are several |",
    "| torn reads | 0 | | `tests/gpu/test_processes_cuda.py` asserts it |",
)


def main(folder: Path) -> None:
    print("| what | target | measured | ok |\n|---|---|---|---|")
    for target in TARGETS:
        values = list(measured(target, folder))
        worst = (min if target.target.startswith(">=") else max)(values, default=None)
        if worst is None:
            print(f"| {target.what} | {target.target} {target.unit} | not measured | |")
        else:
            verdict = "yes" if meets(worst, target.target) else "**no**"
            print(f"| {target.what} | {target.target} {target.unit} | {worst:.3g} | {verdict} |")
    print("\n".join(ELSEWHERE))


def measured(target: Target, folder: Path) -> Iterable[float]:
    try:
        rows = json.loads((folder / target.file).read_text())["rows"]
    except (OSError, ValueError):
        return
    for row in rows:
        named = row["name"].startswith(target.rows)
        wanted = row.get("unit", target.unit) == target.unit and not row.get("unmeasurable")
        if target.of and target.of not in row["name"]:
            continue
        if named and wanted and "bandwidth" not in row["name"] and (not target.flat or "flat" in row["name"]):
            yield row["value"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
