"""What tests of a trainer of several processes share: its processes, and the comparison with one."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from kit.runs import ROOT, Command, audited, command, logged, read, steps_logged
from kit.waiting import until_gone

EXAMPLES = ROOT / "examples" / "accelerate"
TOLERANCE = 1e-5
COMPARED = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "async/staleness_mean")


def figures(folder: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step; of one that was trained again after a resume, the second time.

    Only the first step on a generation batch has its rewards.
    """
    steps = logged(folder / "worker")
    return {entry["step"]: {name: entry[name] for name in COMPARED if name in entry} for entry in steps}


def same_training(several: Path, one: Path, steps: int, *, accumulates: bool = False) -> None:
    """accumulates: several forward passes a step, whose entropies TRL averages without their lengths."""
    got, expected = figures(several), figures(one)
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
    found: dict[str, psutil.Process] = {}
    for child in run.children():
        with suppress(psutil.NoSuchProcess):  # some end meanwhile
            found.setdefault(child.environ().get("RANK", ""), child)
    return [found[rank] for rank in sorted(filter(None, found))]


def config_of(example: str, processes: int, folder: Path) -> Path:
    """A copy of an example's accelerate configuration for another number of ranks."""
    text = (EXAMPLES / example).read_text()
    assert "num_processes: 2\n" in text and "gpu_ids: 0,1\n" in text
    config = folder / f"{processes}_{example}"
    text = text.replace("num_processes: 2\n", f"num_processes: {processes}\n")
    config.write_text(text.replace("gpu_ids: 0,1\n", f"gpu_ids: {','.join(map(str, range(processes)))}\n"))
    return config


def killed_resumed_and_stopped(folder: Path, arguments: list[str], env: dict[str, str], rank: int = 1) -> Path:
    """The last checkpoint of a run that one dead rank ends, and that is stopped after a resume.

    Checkpoint 8, from which it continues at the latest, is in the middle of a generation batch.
    """
    run_dir = folder / "worker"
    with command(*arguments, cwd=folder, **env) as run:
        run.wait_until(lambda: (folder / "checkpoints/checkpoint-8/rollout_state.json").exists(), "a checkpoint")
        everybody = run.children()
        ranks(run)[rank].kill()
        assert run.wait() != 0, run.output
    named = re.search(r"Ranks? ([\d, ]+) of the trainer \(pids? [\d, ]+\) ha(s|ve) died", run.output)
    assert named is not None and str(rank) in named[1].split(", "), run.output
    assert "Start again with --resume" in run.output
    assert read(run_dir / "run.json")["state"] == "failed"
    until_gone(everybody)

    step = max(steps_logged(run_dir))
    with command(*arguments, "--resume", cwd=folder, **env) as run:
        run.wait_until(lambda: max(steps_logged(run_dir)) > step + 2, "steps after the resume")
        everybody = run.children()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 0, run.output
    assert read(run_dir / "run.json")["state"] == "stopped"
    until_gone(everybody)
    last = max(steps_logged(run_dir))
    checkpoint = folder / "checkpoints" / f"checkpoint-{last}"
    assert read(checkpoint / "rollout_state.json")["step"] == last
    audited(run_dir)
    return checkpoint
