"""Writes docs/benchmarks.md from the results in benchmarks/results/*.json, so that no figure is typed by hand.

python benchmarks/weights.py --json benchmarks/results/weights.json      (and the others)
python benchmarks/to_docs.py
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TITLES = {
    "weights": ("Sharing weights", "Figures called *raw* are a plain copy of the same bytes in the same run."),
    "gpu_weights": (
        "Sharing weights on a GPU",
        "1 B parameters in 400 tensors, with nothing beside it. Figures called *raw* are a plain copy of half a "
        "gigabyte on the GPU, in the same run. What surrounds a copy weighs on 2 GB (bf16). More in [gpu.md](gpu.md).",
    ),
    "job_queue": ("The job queue", "Compared with other queues for one machine, in one run."),
    "chaos": ("Faults", "Every row is a test that kills, stops or corrupts; the figures are what it counted."),
    "monkey": (
        "The monkey",
        "Faults from a table, in any order, against real runs of a tiny model with two workers, 8 to a run. After "
        "each, the audit is clean or says what is really lost, the weights are bit for bit those of a run that nothing "
        "disturbed, and the user's files are as they were. A row says how often a fault was struck.",
    ),
    "fuzz": (
        "Hostile files",
        "Each reader of files against damaged and invented ones, searched by coverage (atheris, hypothesis): only its "
        "own errors may come out, within 5 s of CPU time and 4 GiB.",
    ),
    "evaluation": (
        "Evaluation",
        "The demo's recipe on two workers, three rounds: five evaluations of 300 problems, 5 answers each. An "
        "evaluation in a run shares the workers with training's own groups, and on a CPU the cores with the trainer, "
        "which is why it takes longer there than alone.",
    ),
    "start": (
        "Start-up",
        "From the command to the end of the first optimizer step of a tiny model, in alternating rounds. Plain TRL is "
        "one process that uses both cores; here three processes import torch, transformers and TRL.",
    ),
    "sweep": (
        "Many seeds",
        "The demo on four seeds in two slots of one core each, and the same runs one after another, each on one core. "
        "Simulated runs are children that sleep. More in [sweeps.md](sweeps.md).",
    ),
    "generators": (
        "Generators",
        "The same weights, prompts and lengths in one run; 64 tokens a completion. A batch is given whole and timed to "
        "its last group, so filling and emptying the engine counts.",
    ),
    "tools": (
        "Tools",
        "What waiting tools cost a worker. A script plays the model, so the time is that of the tools and of what is "
        "around them. More in [generators.md](generators.md#tools-and-environments).",
    ),
    "tools_vllm": (
        "Turns with vLLM",
        "vLLM in a worker, on one core: completions of several turns, with a tool between them that answers at once, "
        "against as many tokens in one turn. Random weights of Qwen3's shape; sides take turns in one process.",
    ),
    "async_vs_trl": ("Asynchronous against synchronous training", "Sides are interleaved in one run."),
    "machines": (
        "A trainer on two machines",
        "Two ranks of one core each, which are on one machine or on two, take turns, step by step, by gloo. A machine "
        "is a network namespace. What a number takes there and back says what the delay of the link is; a relay in "
        "user space makes it, on the same cores. Controls of a ratio are the medians of three thirds of the steps "
        "on one machine. A step is of 6.6 M parameters and 2,048 tokens a rank in fp32; as a run's, it begins with a "
        "group and ends with the leader's word. A publication gathers 26 MB to rank 0. More in "
        "[nodes.md](nodes.md#several-machines-for-the-trainer).",
    ),
    "deltas": (
        "Kept versions",
        "What `--delta-every` costs. A synthetic model of weights ~ N(0, 0.02), trained in fp32 and published in bf16, "
        "of which one update adds lr x N(0, 1) to each: 100 M of them. GB/s are of the weights, by CPU time of one "
        "core. More in [deltas.md](deltas.md).",
    ),
    "sandbox": (
        "The sandbox",
        "Programs of one line, so a start is all that counts. *A core* divides them by the CPU time of all processes; "
        "the other figures depend on what else the machine does.",
    ),
    "turn_credit": ("Credit for each turn", "A tiny model learns to search. More in [credit.md](credit.md)."),
    "turn_credit_chain": (
        "Credit for each of three turns",
        "A tiny model learns to search three times, each time for what it found before. More in "
        "[credit.md](credit.md#three-necessary-turns).",
    ),
}
SCRIPTS = {
    "gpu_weights": "weights.py --device cuda --sizes 1B",
    "tools_vllm": "tools.py --vllm",
    "turn_credit_chain": "turn_credit.py --task chain",
}  # where it is not that of the result's name
HEAD = """# Benchmarks

The scripts in `benchmarks/` measure these figures; `benchmarks/to_docs.py` makes this page from
their results. A missed target says `no`, and stays. The figures are from one machine and vary from
run to run, so read the spread too. Where a control of equal work, done between the measurements,
moved by more than a tenth, or a figure is better than its limit, the row says *not measurable
here*. Accuracy by staleness and correction has a page of its own:
[staleness.md](staleness.md#measured).
"""


def main() -> None:
    parts = [HEAD]
    for name, (title, text) in TITLES.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            parts.append(section(title, text, name, json.loads(path.read_text())))
    (ROOT / "docs" / "benchmarks.md").write_text("\n".join(parts))


def section(title: str, text: str, name: str, result: dict[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    load = result.get("load_before", [0.0])[0]
    busy = f" Other work ran beside it: load {load:.1f} before." if load >= result["machine"]["cores"] else ""
    script = SCRIPTS.get(name, f"{name}.py")
    lines = [f"## {title}", "", wrapped(text), "", wrapped(f"`benchmarks/{script}`. Machine: {machine}.{busy}"), ""]
    lines += ["| what | value | target | reached | min, median, max |", "|---|---|---|---|---|"]
    lines += [line(row) for row in result["rows"]]
    return "\n".join([*lines, ""])


def wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def line(row: dict[str, Any]) -> str:
    if row.get("unmeasurable"):
        return f"| {row['name']} ({row['unmeasurable']}) | not measurable here | {target(row.get('target'))} |  |  |"
    reached = {None: "", True: "yes", False: "no"}[row.get("ok")]
    spread = ", ".join(figure(value) for value in row.get("spread") or [])
    value = f"{figure(row['value'])} {row['unit']}".strip()
    note = f" ({row['note']})" if row.get("note") else ""
    limit = f", at most {figure(row['limit'])} possible" if row.get("limit") is not None else ""
    return f"| {row['name']}{note} | {value} | {target(row.get('target'))}{limit} | {reached} | {spread} |"


def target(value: object) -> str:
    return "" if value in (None, "") else figure(value) if isinstance(value, (int, float)) else str(value)


def figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    main()
