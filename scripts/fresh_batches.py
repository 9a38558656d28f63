"""Measure how far trainer and sampler are apart on fresh rollouts, for tiny models of large random weights on a CPU.

    python scripts/fresh_batches.py [--write]

Trains rows of `make test-matrix` (tests/integration/matrix.py) for a few steps at staleness 0, and prints the least and
the largest mean of |log pi - log mu| over the tokens of a step. With --write, puts the table into docs/staleness.md.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "integration"))

import torch
from matrix import ROWS, Row, get_trainer_of, lora

from kit.in_process import InProcessRun

PAGE = Path(__file__).resolve().parents[1] / "docs" / "staleness.md"
BLOCK = re.compile(r"(<!-- begin: fresh-batches -->\n\n).*?(\n\n<!-- end: fresh-batches -->)", re.DOTALL)


def in_bf16(row: Row) -> Row:
    return replace(row, build=lambda model: model.to(torch.bfloat16))


FAMILIES = [row for name, row in ROWS.items() if name.startswith("family ") and row.verdict == "equal"]
RUNS: dict[str, list[Row]] = {
    f"fp32, {len(FAMILIES)} families of models": FAMILIES,
    "fp32 with LoRA": [ROWS["adapter LoRA"], ROWS["adapter LoRA of all linear layers"]],
    "fp16 weights": [ROWS["setting a model in fp16"]],
    "bf16 weights, bf16 autocast": [ROWS["setting a model in bf16"], ROWS["setting bf16 mixed precision"]],
    "a mixture of experts (Qwen3, Mixtral) in bf16": [in_bf16(Row(family=name)) for name in ("qwen3_moe", "mixtral")],
    "LoRA on a bf16 model": [in_bf16(Row(peft=lora()))],
    "`cast_lm_head_to_fp32` on a bf16 model": [ROWS["setting `cast_lm_head_to_fp32`"]],
}


def distances(row: Row) -> Iterator[float]:
    """Yield the mean distance of each step, in nats."""
    with tempfile.TemporaryDirectory() as folder:
        run = InProcessRun(get_trainer_of(row, Path(folder))).train()
    yield from (entry["async/logprob_mismatch"] for entry in run.logs)


def table() -> str:
    lines = ["| run | mean \\|Δ\\| |", "|---|---|"]
    for name, rows in RUNS.items():
        found = [distance for row in rows for distance in distances(row)]
        least, most = (f"{number:.2g}" for number in (min(found), max(found)))
        lines.append(f"| {name} | {most} at most |" if max(found) < 1e-4 else f"| {name} | {least} to {most} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    made = table()
    if "--write" in sys.argv[1:]:
        page, found = BLOCK.subn(lambda block: block[1] + made + block[2], PAGE.read_text())
        assert found == 1, f"{PAGE} has {found} places for the table"
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
