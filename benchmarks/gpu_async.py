"""One GPU: TRL alone, and the same with 1, 2 and 4 workers that share its memory. Prints a Markdown table.

    python benchmarks/gpu_async.py [--device 0|cpu] [--shape 0.6B|tiny] [--steps N] [--workers 1,2,4] [--limit SECONDS]

Not counted are the first four steps (warm-up, and rollouts that were sampled during it) and the last two (the workers
are idle). Memory of a process is what nvidia-smi says, at most, while it ran.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP = ROOT / "benchmarks" / "setups" / "qwen3_shape.py"
WARM_UP, LAST = 4, 2
SAMPLE_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="0")
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--completion", type=int, default=256)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--waiting", action="store_true", help="the first with workers once more, as they waited once")
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for each row")
    options = parser.parse_args()
    print("| what | steps | seconds a step (least to most) | tokens/s | torch's peak in the trainer | processes, MiB |")
    print("|---|---|---|---|---|---|")
    failed = 0
    speeds: dict[str, float] = {}
    rows = [("TRL alone", ["--device", options.device])]
    for count in map(int, options.workers.split(",")):
        devices = ",".join([options.device] * count)
        arguments = ["--master-device-id", options.device, "--worker-device-ids", devices, "--generator", "hf"]
        arguments += ["--max-staleness", "1"]
        rows.append((f"{count} worker{'s' if count > 1 else ''}", arguments))
    if options.waiting:
        rows.append((f"{rows[1][0]}, waiting for the GPU at every token", rows[1][1]))
    for name, arguments in rows:
        row = measure(arguments, options, wait="waiting" in name)
        failed += row is None
        if row is not None:
            speeds[name] = row[1]
        print(f"| {name} | {row[0] if row else 'failed: see above | | | |'}", flush=True)
        if options.json:  # after each row: a machine may be taken away in the middle
            found = [{"name": name, "value": share} for name, share in shares(speeds).items()]
            options.json.write_text(json.dumps({"rows": found}, indent=1))
    for name, share in shares(speeds).items():
        print(f"\n{name}: {share:.2f}", flush=True)
    return 1 if failed else 0


def shares(speeds: dict[str, float]) -> dict[str, float]:
    """Tokens a second, which is rollouts a second where no completion ends by itself, against TRL alone."""
    alone = speeds.get("TRL alone")
    others = {name: speed for name, speed in speeds.items() if name != "TRL alone"}
    return {f"{name} against TRL alone": speed / alone for name, speed in others.items()} if alone else {}


def measure(arguments: list[str], options: argparse.Namespace, *, wait: bool = False) -> tuple[str, float] | None:
    """One run; its row of the table and tokens a second, None where it made too few steps."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.jsonl"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
            "QWEN3_SHAPE": options.shape,
            "COMPLETION": str(options.completion),
            "STEPS": str(WARM_UP + options.steps + LAST),
            "STEP_LOG": str(log),
            "WAIT_AT_EVERY_TOKEN": "1" if wait else "0",
        }
        command = [sys.executable, "-m", "async_grpo.cli", "train", str(SETUP), *arguments]
        with (Path(folder) / "output.txt").open("wb") as output:
            run = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
            memory = watch(run, options.limit)
        print(last_step(Path(folder) / "output.txt"), file=sys.stderr, flush=True)
        steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        counted = steps[WARM_UP - 1 : WARM_UP + options.steps]
        if len(counted) < 2:
            print((Path(folder) / "output.txt").read_text(errors="replace")[-3000:], file=sys.stderr)
            return None
        first, last = counted[0], counted[-1]
        seconds = last["time"] - first["time"]
        done = last["step"] - first["step"]
        each = ", ".join(str(size) for size in sorted(memory.values(), reverse=True)) or "not to be had"
        speed = (last["tokens"] - first["tokens"]) / seconds
        each_s = [after["time"] - before["time"] for before, after in itertools.pairwise(counted)]
        step = f"{seconds / done:.3f} ({min(each_s):.3f} to {max(each_s):.3f})"
        return f"{done} | {step} | {speed:,.0f} | {last['memory'] / 2**20:,.0f} MiB | {each} |", speed


def last_step(output: Path) -> str:
    """What the run says of its last step: how long the trainer waits, and how busy the workers are."""
    lines = [line for line in output.read_text(errors="replace").splitlines() if " step " in line]
    return lines[-1] if lines else "it says of no step"


def watch(run: subprocess.Popen[bytes], limit_s: float) -> dict[str, int]:
    """Wait for the run, at most so long; then it is asked to end. The largest memory of each process on the GPU."""
    largest: dict[str, int] = defaultdict(int)
    deadline = time.monotonic() + limit_s
    while run.poll() is None:
        for pid, size in memory_of_processes():
            largest[pid] = max(largest[pid], size)
        if time.monotonic() > deadline:
            run.terminate()
            try:
                run.wait(20)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
        time.sleep(SAMPLE_S)
    return largest


def memory_of_processes() -> list[tuple[str, int]]:
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    pairs = [line.split(",") for line in answer.stdout.splitlines() if line.count(",") == 1]
    return [(pid.strip(), int(size)) for pid, size in pairs if size.strip().isdecimal()]


if __name__ == "__main__":
    sys.exit(main())
