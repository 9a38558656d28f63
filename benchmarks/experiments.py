"""What an experiment costs besides its trainings: its queue, generation with two workers, and scores of a reward model.

    python benchmarks/experiments.py [--only PART …] [--json FILE] [--update-docs]

`queue`: 24 jobs in 12 lines of 2 rounds, whose stages are children that sleep 1 to 8 s, in 2 and in 8 places, against
the larger of work / places and the longest path, plus .2 s for each start of a place; and the queue's own work.
`generation`: `async-grpo generate` with two workers of one core each against one, in turns; where there are GPUs, with
2, 4 and 8 of them against one. `scoring`: a reward model of 4 M parameters on texts of 8 to 256 tokens, in batches of
32 against 2, in turns. What the others are held against is the control of equal work. No stage is trained.
Of a part that is not measured again, the rows of the JSON file are kept.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.control import PAIRS
from benchmarks.table import Row, as_text, keep, row

from async_grpo_experiments.slots.ledger import FINISHED, Ledger
from async_grpo_experiments.slots.places import Place
from async_grpo_experiments.slots.schedule import Command, Task, TaskSchedule

LINES, ROUNDS, SEEDS = 12, 2, 3
PLACES = (2, 8)
START_S = 0.2
SETUP = Path(__file__).with_name("setups") / "generation.py"
RESULTS = Path(__file__).with_name("results") / "experiments.json"
TEXTS = 192
ON_GPUS = {2: ">= 1.8", 4: ">= 3.5", 8: ">= 6.5"}  # of the original's guide


def graph(seed: int) -> dict[str, tuple[float, tuple[str, ...]]]:
    """Seconds and needs of each stage: train of a round needs its generate, and generate the train before."""
    draw, found = random.Random(seed), dict[str, tuple[float, tuple[str, ...]]]()
    for line in range(LINES):
        before: tuple[str, ...] = ()
        for number in range(1, ROUNDS + 1):
            job = f"line{line}_r{number}"
            whole = draw.uniform(1, 8)  # of the job
            for kind, part in (("generate", 0.5), ("train", 0.3), ("evaluate", 0.2)):
                needs = before if kind == "generate" else (f"{job}.{'train' if kind == 'evaluate' else 'generate'}",)
                found[f"{job}.{kind}"] = (whole * part, needs)
            before = (f"{job}.train",)
    return found


def longest(stages: dict[str, tuple[float, tuple[str, ...]]]) -> dict[str, float]:
    """The longest path from each stage to an end, in seconds."""
    found = {name: seconds for name, (seconds, _) in stages.items()}
    for name in reversed(stages):
        for need in stages[name][1]:
            found[need] = max(found[need], stages[need][0] + found[name])
    return found


def run(stages: dict[str, tuple[float, tuple[str, ...]]], places: int, folder: Path) -> tuple[float, float]:
    """Seconds of the whole, and the share of a core that the queue had."""

    def task(name: str, seconds: float, needs: tuple[str, ...], priority: float) -> Task:
        command = Command(["sleep", f"{seconds:.3f}"], os.environ, folder / f"{name}.log")
        return Task(name=name, command=lambda place: command, needs=needs, priority=priority)

    ahead = longest(stages)
    tasks = [task(name, seconds, needs, ahead[name]) for name, (seconds, needs) in stages.items()]
    ledger, me = Ledger(folder / "slots.jsonl"), psutil.Process()
    started, cpu = time.monotonic(), sum(me.cpu_times()[:2])
    TaskSchedule(tasks, [Place(name=str(n)) for n in range(places)], ledger, say=lambda text: None).run()
    took, cpu = time.monotonic() - started, sum(me.cpu_times()[:2]) - cpu
    assert all(record.state == FINISHED for record in ledger.records.values())
    ledger.close()
    return took, cpu / took


def queue() -> Iterator[Row]:
    for places in PLACES:
        factors, shares = [], []
        for seed in range(SEEDS):
            stages = graph(seed)
            work, path = sum(seconds for seconds, _ in stages.values()), max(longest(stages).values())
            with tempfile.TemporaryDirectory() as folder:
                took, share = run(stages, places, Path(folder))
            factors.append((took - START_S * len(stages) / places) / max(work / places, path))
            shares.append(100 * share)
        name = f"{LINES * ROUNDS} jobs in {places} places"
        yield row(f"{name}, less {START_S} s a start: multiple of the bound", factors, "", target="<= 1.15")
        yield row(f"{name}: the queue, of a core", shares, "%", target="<= 3")


def generation() -> Iterator[Row]:
    """Workers of one core, or of one GPU, each against one, by the seconds from when all have answered once."""
    import torch
    from benchmarks.setups.generation import PROBLEMS, SAMPLES, TOKENS

    gpus, targets = torch.cuda.device_count(), {2: ">= 1.6"}
    if gpus:
        targets = {count: target for count, target in ON_GPUS.items() if count <= gpus}
    rates: dict[int, list[float]] = {count: [] for count in (1, *targets)}
    each = "GPU" if gpus else "core"
    for _ in range(PAIRS):
        for workers, found in rates.items():
            found.append(PROBLEMS * SAMPLES * TOKENS / generated(workers))
    controls = [1 / rate for rate in rates[1]]
    yield row(f"generate, one worker of one {each}", rates[1], "tokens/s")
    for count, target in targets.items():
        times = [more / one for one, more in zip(rates[1], rates[count], strict=True)]
        name = f"generate, {count} such workers against one"
        yield row(name, times, "x", limit=float(count), target=target, controls=controls)


def generated(workers: int) -> float:
    """Seconds of the timed part of one generation."""
    import torch
    from benchmarks.setups.generation import LETTERS, SHAPE

    from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder, tokenizer = Path(name), words_tokenizer(LETTERS)
        model = save(folder / "model", endless_transformer(tokenizer, **SHAPE), tokenizer)
        keys = {"GENERATION_WORKERS": str(workers), "GENERATION_SECONDS": str(folder / "seconds")}
        command = ["generate", model, "--config", str(SETUP), "--out", str(folder / "rows")]
        on_gpus = ["--worker-device-ids", ",".join(map(str, range(workers)))]
        command += on_gpus if torch.cuda.is_available() else ["-n", str(workers)]
        subprocess.run(
            [sys.executable, "-m", "async_grpo.cli", *command, "--run-dir", str(folder / "run")],
            env={**os.environ, **keys, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return float((folder / "seconds").read_text())


def scoring() -> Iterator[Row]:
    """The same texts in batches of 2 and of 32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from async_grpo_experiments.reward_models import scores_of_texts

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    keys = {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "num_labels": 1}
    model = Qwen3ForSequenceClassification(Qwen3Config(**shape, **keys)).eval()
    draw = random.Random(0)
    texts = [[draw.randrange(512) for _ in range(draw.randint(8, 256))] for _ in range(TEXTS)]
    rates: dict[int, list[float]] = {2: [], 32: []}
    scores = {}
    for _ in range(PAIRS):
        for batch, found in rates.items():
            began = time.monotonic()
            scores[batch] = scores_of_texts(model, texts, batch)
            found.append(TEXTS / (time.monotonic() - began))
    apart = max(abs(one - other) for one, other in zip(scores[2], scores[32], strict=True))
    yield row("scores of a reward model, batches of 2", rates[2], "texts/s")
    times = [large / small for small, large in zip(rates[2], rates[32], strict=True)]
    yield row("scores of a reward model, batches of 32 against 2", times, "x", controls=[1 / rate for rate in rates[2]])
    yield row("scores of batches of 32 and 2, apart at most", [apart], "", target="<= 1e-5")


PARTS: dict[str, Callable[[], Iterator[Row]]] = {"queue": queue, "generation": generation, "scoring": scoring}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--update-docs", action="store_true", help="write the table into docs/experiments.md")
    options = parser.parse_args()
    measured = [one for part in options.only for one in PARTS[part]()]
    print(as_text(measured))
    keep("experiments", options.json, measured, in_docs=options.update_docs)


if __name__ == "__main__":
    main()
