"""`python scripts/test_parallel_setup.py`: whether experiments can run side by side here.

It imports what stages need, counts the devices, writes a stage's inputs and reads them again, and has two workers
sample from a small random model. Exit code 0: all of it works.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import psutil

from async_grpo.formatting import counted, size
from async_grpo.setup.devices import visible_gpus
from async_grpo.setup.process import path_to_us

SETUP = '''"""A small random model on sums, which two workers sample from."""

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from async_grpo_experiments.problems.table import load


def get_trainer():
    sums = load("sums", max_examples=4)
    config = GRPOConfig("unused", per_device_train_batch_size=4, num_generations=4, max_completion_length=8,
                        report_to="none", use_cpu={use_cpu})
    return GRPOTrainer("{model}", sums.reward, args=config, train_dataset=Dataset.from_list(sums.rows))
'''
WAIT_S = 600.0


def imports() -> None:
    """Import what a runner and its stages need. `ImportError` names what is not there."""
    for name in ("torch", "transformers", "trl", "datasets", "accelerate", "hydra", "omegaconf"):
        print(f"  {name} {getattr(import_module(name), '__version__', '')}")
    print("Imports OK")


def serialization(folder: Path) -> None:
    """Write and read what goes from one stage to the next: a configuration, rows, a manifest."""
    from async_grpo.rundir.shape import as_json, shaped
    from async_grpo_experiments.algorithms.rows import LabelledRow, Rows
    from async_grpo_experiments.runner import states
    from async_grpo_experiments.runner.config import ExperimentConfig, checked

    config = checked(
        {
            "experiment": {"name": "setup"},
            "models": {"tiny": {"ref": "tiny"}},
            "datasets": {"sums": {}},
            "training": {"datasets": ["sums"]},
            "algos": {"QSharp": {}},
        }
    )
    assert shaped(ExperimentConfig, as_json(config)) == config, "a configuration is not what was written"
    row = LabelledRow(problem=0, group=0, prompt=(1, 2), prefix=(), continuation=(3,), label=1.0)
    attempt = states.begin(folder / "data", states.MadeOf(inputs={}, keys={}))
    Rows((row,)).save(attempt / "rows.arrow")
    made = states.finish(attempt)
    assert Rows.load(made / "rows.arrow").items == (row,), "rows are not what was written"
    manifest = states.manifest_of(made)
    assert manifest is not None and not states.damage(made, manifest), "a folder is not what was written"
    print("Serialization OK")


def generation(folder: Path, gpus: int) -> None:
    """Sample with two workers, and print the device and the most memory of each process."""
    from async_grpo.rundir.paths import RunDir
    from async_grpo_experiments.problems.table import load
    from async_grpo_experiments.worlds.tiny import save, small_transformer, words_tokenizer

    words = sorted({word for row in load("sums").rows for word in str(row["prompt"]).split()})
    tokenizer = words_tokenizer(words)
    model = save(folder / "model", small_transformer(tokenizer), tokenizer)
    (folder / "setup.py").write_text(SETUP.replace("{model}", model).replace("{use_cpu}", str(not gpus)))
    run, out = folder / "run", folder / "samples"
    command = [sys.executable, "-m", "async_grpo.cli", "generate", model, "--config", str(folder / "setup.py")]
    command += ["--run-dir", str(run), "--out", str(out), "--deterministic"]
    command += ["--worker-device-ids", f"0,{1 if gpus > 1 else 0}"] if gpus else ["--num-workers", "2"]
    with (folder / "log.txt").open("wb") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path_to_us(os.environ)}
        )
        memory = _watch(child)
    assert child.returncode == 0, f"two workers cannot sample:\n{(folder / 'log.txt').read_text()[-3000:]}"
    state = RunDir(run).read_state()
    assert state is not None
    devices = {f"worker {number}": device for number, device in enumerate(state.plan.worker_devices, 1)}
    devices["server"] = state.plan.master_device
    for role, most in sorted(memory.items()):
        device = devices.get(role, "")
        print(f"  {role} on {device if device == 'cpu' else f'GPU {device}'}, {size(most)} of memory")
    print(f"{counted(len(state.plan.worker_devices), 'worker')} OK")


def _watch(child: subprocess.Popen[bytes]) -> dict[str, int]:
    """The most memory that each role of a run had until it ended."""
    found: dict[str, int] = {}
    deadline = time.monotonic() + WAIT_S
    try:
        while child.poll() is None and time.monotonic() < deadline:
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(child.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                        line = " ".join(process.cmdline())
                        if role := re.search(r"async_grpo\.cli (server|worker)(?=.*?(?:--id (\d+)|$))", line):
                            name = " ".join(filter(None, role.groups()))
                            found[name] = max(found.get(name, 0), process.memory_info().rss)
            time.sleep(0.2)
    finally:
        child.terminate()
        child.wait()
    return found


def main() -> int:
    gpus = visible_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    print(f"{counted(gpus, 'GPU')}, CUDA_VISIBLE_DEVICES={visible!r}, {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(prefix="parallel-setup-") as name:
        try:
            imports()
            serialization(Path(name))
            generation(Path(name), gpus)
        except (ImportError, AssertionError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
