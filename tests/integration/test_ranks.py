"""A trainer of two processes, on the CPU with gloo: the training of one; one writes; all end together."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
from runs import DEADLINE_S, ROOT, SETUP, Command, command, gone, read, steps_logged
from safetensors.torch import load_file

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "examples" / "accelerate"
SHARDED_SETUP = SETUP.with_name("sharded_model.py")
TOLERANCE = 1e-5
STEPS = "6"
COMPARED = ("loss", "grad_norm", "reward", "reward_std", "entropy", "completions/mean_length", "async/staleness_mean")


def run_to_the_end(cwd: Path, setup: Path, *options: str, **env: str) -> None:
    cwd.mkdir()
    arguments = ["train", str(setup), "--num-workers", "1", "--deterministic", *options]
    with command(*arguments, cwd=cwd, TEST_STEPS=STEPS, **env) as run:
        assert run.process.wait(DEADLINE_S) == 0, run.output


def logged(cwd: Path) -> list[dict[str, float]]:
    entries = map(json.loads, (cwd / "worker" / "metrics.jsonl").read_text().splitlines())
    return [{name: entry[name] for name in COMPARED} for entry in entries if "loss" in entry]


@pytest.mark.parametrize(
    ("config", "setup", "model"),
    [("ddp.yaml", SETUP, "full"), ("fsdp2.yaml", SHARDED_SETUP, "lora")],
    ids=["DDP", "FSDP2 with LoRA"],
)
def test_two_ranks_train_as_one_process_does(config: str, setup: Path, model: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_to_the_end(one, SETUP, TEST_MODEL=model)
    run_to_the_end(two, setup, "--accelerate-config", str(EXAMPLES / config), TEST_MODEL=model)
    expected, got = logged(one), logged(two)
    assert len(got) == int(STEPS)
    for ours, reference in zip(got, expected, strict=True):
        assert ours == pytest.approx(reference, abs=TOLERANCE, rel=TOLERANCE)
    assert sum(entry["grad_norm"] > 0.1 for entry in got) > 3, "the comparison must see gradients"

    last = two / "checkpoints" / f"checkpoint-{STEPS}"
    assert {path.name for path in last.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert read(last / "rollout_state.json")["step"] == int(STEPS)
    if config == "ddp.yaml":
        weights = load_file(one / "checkpoints" / last.name / "model.safetensors")
        for name, tensor in load_file(last / "model.safetensors").items():
            assert (tensor - weights[name]).abs().max() < TOLERANCE, name


def ranks(run: Command) -> list[psutil.Process]:
    """The trainer's processes of a run, rank 0 first."""
    found = [(child.environ().get("RANK"), child) for child in run.children() if "RANK" in child.environ()]
    return [child for _, child in sorted(found, key=lambda pair: pair[0])]


def test_a_dead_rank_ends_the_run_with_a_sentence_and_it_can_be_resumed(tmp_path: Path) -> None:
    arguments = ["train", str(SETUP), "--num-workers", "1", "--accelerate-config", str(EXAMPLES / "ddp.yaml")]
    run_dir = tmp_path / "worker"
    with command(*arguments, cwd=tmp_path, TEST_STEPS="100000") as run:
        run.wait_until(lambda: (tmp_path / "checkpoints/checkpoint-4/rollout_state.json").exists(), "a checkpoint")
        everybody = run.children()
        ranks(run)[1].kill()
        assert run.process.wait(DEADLINE_S) not in (0, None), run.output
    assert "Rank 1 of the trainer" in run.output
    assert "Start again with --resume" in run.output
    assert read(run_dir / "run.json")["state"] == "failed"
    assert gone(everybody)

    step = max(steps_logged(run_dir))
    with command(*arguments, "--resume", cwd=tmp_path, TEST_STEPS="100000") as run:
        run.wait_until(lambda: max(steps_logged(run_dir)) > step + 2, "steps after the resume")
        everybody = run.children()
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.process.wait(DEADLINE_S) == 0, run.output
    assert read(run_dir / "run.json")["state"] == "stopped"
    assert gone(everybody)
    checkpoints = [read(path)["step"] for path in (tmp_path / "checkpoints").glob("*/rollout_state.json")]
    assert max(checkpoints) == max(steps_logged(run_dir))
    with command("audit", str(run_dir), cwd=tmp_path) as audit:
        assert audit.process.wait(DEADLINE_S) == 0, audit.output


def test_a_checkpoint_in_the_middle_of_a_batch_is_refused_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Those without a share would wait for a batch that rank 0 has no reason to hand out."""
    one = ["train", str(SETUP), "--num-workers", "1"]
    two = [*one, "--accelerate-config", str(EXAMPLES / "ddp.yaml"), "--resume"]
    twice = {"TEST_GRPO": '{"num_iterations": 2}'}
    with command(*one, cwd=tmp_path, TEST_STEPS="5", **twice) as run:
        assert run.process.wait(DEADLINE_S) == 0, run.output
    assert (tmp_path / "checkpoints/checkpoint-5/rollout_batch.safetensors").exists()
    sentence = "was written in the middle of a generation batch by a trainer of 1 rank, and this one has 2"
    for arguments in ([*two, "--dry-run"], two):
        with command(*arguments, cwd=tmp_path, TEST_STEPS="8", **twice) as run:
            assert run.process.wait(DEADLINE_S) == 2, run.output
        assert sentence in run.output
    assert (tmp_path / "worker/log_parameter_server.txt").read_text().count(sentence) == 2, "each rank has said so"


def test_a_configuration_that_is_not_there(tmp_path: Path) -> None:
    with command("train", str(SETUP), "--accelerate-config", "nowhere.yaml", cwd=tmp_path) as run:
        assert run.process.wait(DEADLINE_S) == 2
    assert "There is no accelerate configuration nowhere.yaml" in run.output
