"""`--deterministic`: the same seed, the same weights, whoever generates and whoever dies; and `replay`."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
from runs import SETUP, Command, command, read, steps_logged

from async_grpo.roles.replay import weights_digest

pytestmark = pytest.mark.integration

STEPS = 24
OPTIONS = ("--steps", str(STEPS), "--deterministic")


def finish(folder: Path, *options: str, **env: str) -> None:
    with command("train", str(SETUP), *OPTIONS, *options, cwd=folder, **env) as run:
        assert run.wait() == 0, run.output


def weights_of(folder: Path) -> str:
    return weights_digest(folder / "checkpoints" / f"checkpoint-{STEPS}")


def kill_the_server_at(step: int, folder: Path, *options: str, **env: str) -> None:
    with command("train", str(SETUP), *OPTIONS, *options, cwd=folder, TEST_REWARD_S="0.1", **env) as run:
        run.wait_until(lambda: len(steps_logged(folder / "worker")) >= step, f"step {step}")
        server_of(run).kill()
        assert run.wait() != 0, run.output


def server_of(run: Command) -> psutil.Process:
    return next(child for child in run.children() if "server" in child.cmdline())


def undisturbed(folder: Path, **env: str) -> str:
    folder.mkdir()
    finish(folder, "-n", "1", **env)
    return weights_of(folder)


def test_any_number_of_workers_and_any_death_give_the_same_weights_and_so_does_a_replay(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "one")

    disturbed = tmp_path / "three"
    disturbed.mkdir()
    kill_the_server_at(9, disturbed, "-n", "3")
    finish(disturbed, "-n", "3", "--resume")
    assert weights_of(disturbed) == expected

    with command("audit", "worker", cwd=disturbed) as audit:
        assert audit.wait() == 0, audit.output
    with command("replay", "worker", "-d", "cpu", cwd=disturbed) as replay:
        assert replay.wait() == 0, replay.output
    assert f"SHA-256 {expected}" in replay.output
    assert "equal to" in replay.output
    assert read(disturbed / "worker" / "run.json")["deterministic"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_iterations": 2, "steps_per_generation": 3},
        pytest.param({"num_iterations": 3}, marks=pytest.mark.slow),
        pytest.param({"steps_per_generation": 3}, marks=pytest.mark.slow),
        pytest.param({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_death_after_a_checkpoint_in_the_middle_of_a_batch(tmp_path: Path, arguments: dict[str, int]) -> None:
    """Checkpoints are at steps 4, 8, …, so some lie between the optimizer steps of one generation batch.

    With `gradient_accumulation_steps` step 8 ends an epoch, and so a batch: there it is the checkpoint before.
    """
    saved = 4 if "gradient_accumulation_steps" in arguments else 8
    env = {"TEST_GRPO": json.dumps(arguments)}
    expected = undisturbed(tmp_path / "one", **env)
    folder = tmp_path / "killed"
    folder.mkdir()
    kill_the_server_at(saved + 1, folder, "-n", "2", **env)
    assert (folder / f"checkpoints/checkpoint-{saved}/rollout_batch.safetensors").exists()
    finish(folder, "-n", "2", "--resume", **env)
    assert weights_of(folder) == expected
    for check in (("audit", "worker"), ("replay", "worker", "-d", "cpu")):
        with command(*check, cwd=folder, **env) as run:
            assert run.wait() == 0, run.output
    assert f"SHA-256 {expected}" in run.output


@pytest.mark.slow
def test_three_deaths_give_the_same_weights(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    folder = tmp_path / "killed"
    folder.mkdir()
    kill_the_server_at(5, folder, "-n", "2")
    kill_the_server_at(13, folder, "-n", "2", "--resume")
    kill_the_server_at(20, folder, "-n", "2", "--resume")
    finish(folder, "-n", "2", "--resume")
    assert weights_of(folder) == expected
