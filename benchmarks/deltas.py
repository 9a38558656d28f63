"""What it costs to keep every version of the weights: bytes, and seconds of one core.

    python benchmarks/deltas.py [--quick] [--json FILE]

Synthetic: 100 M weights w ~ N(0, 0.02) are trained in fp32 and published in bf16. One update adds lr * N(0, 1) to each,
which is about what Adam does. "Unchanged" is the share of bf16 weights that stay equal. The rule says that a weight
which is itself bf16 stays where |dw| < |w| / 256; its row has the share that the rule expects beside the measured one.
The other codecs get the same two versions: safetensors is the new version whole, XOR its difference, both with
zstandard at level 3. Real: the demo's recipe for 100 steps on two workers, with and without --delta-every 1, in rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import zstandard
from benchmarks.control import PAIRS, control_s
from benchmarks.table import ROOT, Row, as_text, row, write_json
from numpy.typing import NDArray

from async_grpo.deltas.chain import Chain, chain_folder
from async_grpo.deltas.delta import Weights, apply, digest, encode, pack, read
from async_grpo.deltas.statistics import statistics
from async_grpo.setup.process import keep_freed_memory

RECIPE = ROOT / "src" / "app" / "trainer_setup_tiny.py"
RATES = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 1e-3)
SPEED_AT = {"95% unchanged": 1.6e-6, "75% unchanged": 1.45e-5}  # learning rates that leave about so many


def bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Rounded to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def model(words: NDArray[np.uint16]) -> Weights:
    """A model of matrices of a million weights."""
    return {f"layers.{i}.w": part for i, part in enumerate(np.array_split(words, max(1, len(words) // 1_000_000)))}


def timed(call: Callable[[], Any], times: int) -> tuple[Any, list[float]]:
    """The result, and seconds of CPU time: all of it runs on one core, and others may use this machine."""
    seconds = []
    for _ in range(times):
        started = time.process_time()
        found = call()
        seconds.append(time.process_time() - started)
    return found, seconds


def synthetic(size: int, times: int) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, size).astype(np.float32)
    update = rng.normal(0, 1, size).astype(np.float32)
    old_words = bf16(master)
    old, nbytes = model(old_words), 2 * size
    base = digest(old)
    level_3 = zstandard.ZstdCompressor(level=3)
    for rate in RATES:
        new_words = bf16(master + rate * update)
        packed = sum(map(len, pack(encode(old, model(new_words), base=base))))
        yield row(f"lr {rate:g}: unchanged", [float((new_words == old_words).mean())], "")
        yield row(f"lr {rate:g}: smaller than the weights", [nbytes / packed], "x")
        yield row(f"lr {rate:g}: dense XOR + zstd", [nbytes / len(level_3.compress((old_words ^ new_words).data))], "x")
        yield row(f"lr {rate:g}: safetensors + zstd", [nbytes / len(level_3.compress(new_words.data))], "x")
        kept = (old_words.astype(np.uint32) << 16).view(np.float32)
        measured = float((bf16(kept + rate * update) == old_words).mean())
        expected = float((np.abs(rate * update) < np.abs(kept) / 256).mean())
        note = f"the rule |dw| < |w|/256 expects {expected:.3f}"
        yield row(f"lr {rate:g}: unchanged, bf16 without fp32 master", [measured], "", note=note)
    for name, rate in SPEED_AT.items():
        yield from speed(name, old, model(bf16(master + np.float32(rate) * update)), nbytes, times)


def speed(name: str, old: Weights, new: Weights, nbytes: int, times: int) -> Iterator[Row]:
    base = digest(old)
    delta, encoding = timed(lambda: encode(old, new, base=base), times)
    seconds = []
    with tempfile.TemporaryFile() as file:
        file.writelines(pack(delta))
        file.flush()
        for _ in range(times):
            applied = {key: words.copy() for key, words in old.items()}
            seconds += timed(lambda: apply(read(file.fileno()), applied), 1)[1]  # noqa: B023 - called at once
    unchanged = float(np.mean([np.mean(old[key] == new[key]) for key in old]))
    note = f"{unchanged:.1%} unchanged; with both hashes"
    target = ">= 0.3" if unchanged >= 0.94 else ">= 0.1"
    yield row(f"encode, {name}", [nbytes / s / 1e9 for s in encoding], "GB/s", target=target, note=note)
    yield row(f"apply, {name}", [nbytes / s / 1e9 for s in seconds], "GB/s", target=">= 0.5", note=note)


def demo(folder: Path, steps: int, *options: str) -> float:
    """Seconds of an optimizer step, loading not counted."""
    arguments = ["train", str(RECIPE), "-n", "2", "--steps", str(steps), "--eval-every", "0", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    environment.pop("OMP_NUM_THREADS")
    command = [sys.executable, "-m", "async_grpo.cli", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, timeout=900)
    lines = (folder / "worker" / "metrics.jsonl").read_text().splitlines()
    logged = [entry for entry in map(json.loads, lines) if "loss" in entry]
    return (logged[-1]["monotonic_s"] - logged[0]["monotonic_s"]) / (logged[-1]["step"] - logged[0]["step"])


def real(rounds: int, steps: int) -> Iterator[Row]:
    ratios, controls = [], [control_s()]
    sizes: dict[str, list[float]] = {"fp32": [], "bf16": []}
    unchanged: dict[str, list[float]] = {"fp32": [], "bf16": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as kept:
            without = demo(Path(plain), steps)
            controls.append(control_s())
            ratios.append(demo(Path(kept), steps, "--delta-every", "1") / without)
            controls.append(control_s())
            _measure(Path(kept), sizes["fp32"], unchanged["fp32"])
        with tempfile.TemporaryDirectory() as kept:
            demo(Path(kept), steps, "--delta-every", "1", "--publish-dtype", "bf16")
            _measure(Path(kept), sizes["bf16"], unchanged["bf16"])
    yield row("demo: a step with --delta-every 1 over one without", ratios, "x", target="<= 1.02", controls=controls)
    for dtype in sizes:
        yield row(f"demo in {dtype}: unchanged, mean of its steps", unchanged[dtype], "")
        yield row(f"demo in {dtype}: smaller than its versions", sizes[dtype], "x")


def _measure(folder: Path, sizes: list[float], unchanged: list[float]) -> None:
    found = statistics(Chain(chain_folder(folder / "worker")), spans=())
    sizes.append(sum(step.weights_bytes for step in found.steps) / sum(step.file_bytes for step in found.steps))
    unchanged.append(sum(step.unchanged for step in found.steps) / len(found.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10 M weights, and no run of the demo")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    keep_freed_memory(os.environ)  # as trainers, workers and the command do
    rows = list(synthetic(10_000_000 if args.quick else 100_000_000, 3 if args.quick else 5))
    if not args.quick:
        rows += real(rounds=PAIRS, steps=100)
    print(as_text(rows))
    if args.json is not None:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
