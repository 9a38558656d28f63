"""`--deterministic`: the same seed, the same weights, whoever generates and whoever dies; and `replay`."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from runs import SETUP, Command, command, read, steps_logged

from async_grpo.replay import weights_digest

pytestmark = pytest.mark.integration

STEPS = 24
OPTIONS = ("--steps", str(STEPS), "--deterministic")


def finish(folder: Path, *options: str) -> None:
    with command("train", str(SETUP), *OPTIONS, *options, cwd=folder) as run:
        assert run.wait() == 0, run.output


def weights_of(folder: Path) -> str:
    return weights_digest(folder / "checkpoints" / f"checkpoint-{STEPS}")


def kill_the_server_at(step: int, folder: Path, *options: str) -> None:
    with command("train", str(SETUP), *OPTIONS, *options, cwd=folder) as run:
        run.wait_until(lambda: len(steps_logged(folder / "worker")) >= step, f"step {step}")
        server_of(run).kill()
        assert run.wait() != 0, run.output


def server_of(run: Command) -> psutil.Process:
    return next(child for child in run.children() if "server" in child.cmdline())


def undisturbed(folder: Path) -> str:
    folder.mkdir()
    finish(folder, "-n", "1")
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
