"""What tests of a trainer of several processes share: its processes, and the comparison with one."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from runs import ROOT, Command
from safetensors.torch import load_file

EXAMPLES = ROOT / "examples" / "accelerate"
TOLERANCE = 1e-5
COMPARED = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "async/staleness_mean")


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step; of one that was trained again after a resume, the second time.

    Only the first step on a generation batch has its rewards.
    """
    entries = map(json.loads, (folder / "worker" / "metrics.jsonl").read_text().splitlines())
    steps = [entry for entry in entries if "loss" in entry]
    return {entry["step"]: {name: entry[name] for name in COMPARED if name in entry} for entry in steps}


def same_training(several: Path, one: Path, steps: int, *, accumulates: bool = False) -> None:
    """accumulates: several forward passes a step, whose entropies TRL averages without their lengths."""
    got, expected = logged(several), logged(one)
    for entry in [*got.values(), *expected.values()] if accumulates else ():
        entry.pop("entropy", None)
    for step in range(1, steps + 1):
        assert got[step] == pytest.approx(expected[step], abs=TOLERANCE, rel=TOLERANCE), f"step {step}"
    assert sum(got[step]["grad_norm"] > 0.1 for step in range(1, steps + 1)) > 3, "the comparison must see gradients"


def same_weights(several: Path, one: Path, *steps: int, file: str = "model.safetensors") -> None:
    for step in steps:
        weights, expected = (load_file(folder / f"checkpoints/checkpoint-{step}/{file}") for folder in (several, one))
        assert expected.keys() <= weights.keys(), "DeepSpeed's stage 2 writes a tied head as well"
        for name, tensor in expected.items():
            assert (tensor - weights[name]).abs().max() < TOLERANCE, name


def ranks(run: Command) -> list[psutil.Process]:
    """The trainer's processes of a run, rank 0 first."""
    found = [(child.environ().get("RANK"), child) for child in run.children() if "RANK" in child.environ()]
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def config_of(example: str, processes: int, folder: Path) -> Path:
    """A copy of an example's accelerate configuration for another number of ranks."""
    text = (EXAMPLES / example).read_text()
    assert "num_processes: 2\n" in text and "gpu_ids: 0,1\n" in text
    config = folder / f"{processes}_{example}"
    gpus = ",".join(map(str, range(processes)))
    config.write_text(
        text.replace("num_processes: 2\n", f"num_processes: {processes}\n").replace(
            "gpu_ids: 0,1\n", f"gpu_ids: {gpus}\n"
        )
    )
    return config
