"""Each folder of examples/ does two steps, by the commands of its README."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import datasets
import pytest
from trl import GRPOTrainer

from async_grpo.cli.compute.train import build_parser
from async_grpo.setup.setup_file import load_trainer
from kit.in_process import InProcessRun
from kit.runs import ROOT, command, ran, read, steps_logged

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "examples"


def commands(folder: str) -> list[list[str]]:
    """The command lines of the README's first `bash` block, with whole paths."""
    block = re.search(r"```bash\n(.*?)```", (EXAMPLES / folder / "README.md").read_text(), re.DOTALL)
    assert block is not None
    return [line.replace("examples/", f"{EXAMPLES}/").split() for line in block[1].splitlines()]


@pytest.mark.parametrize("folder", ["custom_reward", "custom_dataset", "images", "lora", "tasks"])
def test_the_setup_file_of_its_command_trains_with_the_rollouts_of_a_worker(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (line,) = commands(folder)
    assert line[:2] == ["async-grpo", "train"]
    setup = build_parser().parse_args(line[2:]).config
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)

    def get_trainer() -> GRPOTrainer:
        trainer = load_trainer(setup, engine_here=False)
        trainer.args.max_steps = 2
        return trainer

    run = InProcessRun(get_trainer).train()
    assert [entry["step"] for entry in run.logs] == [1, 2]


@pytest.mark.slow
def test_images_train_distributed_and_are_replayed(tmp_path: Path) -> None:
    (line,) = commands("images")
    ran(*line[1:], "--distributed", "--steps", "6", "--deterministic", cwd=tmp_path)
    assert steps_logged(tmp_path / "worker") == [1, 2, 3, 4, 5, 6]
    assert read(tmp_path / "worker" / "summary.json")["jobs_quarantined"] == 0
    assert "equal to" in ran("replay", "worker", cwd=tmp_path)


def test_several_types_of_workers_serve_one_run(tmp_path: Path) -> None:
    server, *workers = commands("worker_types")
    with ExitStack() as stack:
        joined = [stack.enter_context(command(*line[1:], cwd=tmp_path)) for line in workers]
        run = stack.enter_context(command(*server[1:], "--steps", "2", cwd=tmp_path))
        assert run.wait() == 0, run.output
        for worker in joined:  # one of them may have been too late to do anything, which is no error
            assert worker.wait() == 0, worker.output
    assert steps_logged(tmp_path / "worker") == [1, 2]
    assert read(tmp_path / "worker" / "summary.json")["jobs_quarantined"] == 0


def test_minimal_grpo_runs(tmp_path: Path) -> None:
    (line,) = commands("minimal_grpo")
    line[0] = sys.executable
    line[line.index("--steps") + 1] = "2"
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 2
