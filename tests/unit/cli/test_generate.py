"""What `async-grpo generate` refuses before it starts anything, and what it plans."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from async_grpo.cli import main
from async_grpo.launch import launcher
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.run_plan import RunPlan, SampledRows
from async_grpo.rundir.shape import shaped
from kit.commands import Says
from kit.plans import planned


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see_gpus: Any) -> list[RunPlan]:
    """The plans that would have started; the folder has a setup file."""
    monkeypatch.chdir(tmp_path)
    see_gpus(0)
    (tmp_path / "setup.py").write_text("def get_trainer():\n    raise AssertionError\n")
    plans: list[RunPlan] = []
    monkeypatch.setattr(launcher, "launch", lambda root, plan: plans.append(plan) or 1)
    return plans


GENERATE = ["generate", "some/model", "--config", "setup.py"]


def test_the_plan_has_the_model_and_the_path_of_the_rows(launched: list[RunPlan], tmp_path: Path) -> None:
    assert main([*GENERATE, "--out", "rows", "--samples", "3", "-n", "2", "--deterministic"]) == 1
    [plan] = launched
    assert plan.models == ("some/model",) and plan.rows == SampledRows(tmp_path / "rows", 3)
    assert plan.training.deterministic and plan.num_workers == 2
    prepare(tmp_path / "generation", plan)
    assert shaped(RunPlan, read_object(RunDir(tmp_path / "generation").state_file)["plan"]).rows == plan.rows


def test_a_folder_that_exists_is_left_alone(launched: list[RunPlan], refused: Says) -> None:
    Path("samples").mkdir()
    assert "samples exists. Choose another --out" in refused(*GENERATE) and not launched


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--samples", "4"], "was begun with --out .*rows --samples 3"),
        (["--out", "other"], "was begun with --out .*rows --samples 3"),
        (["--set", "top_k=3"], "begun without --set, and its answers are used again"),
        (["--seed", "2"], "with --seed 1, and this cannot change"),
    ],
)
def test_a_resume_samples_what_was_begun(
    given: list[str], words: str, launched: list[RunPlan], tmp_path: Path, refused: Says
) -> None:
    begun = planned(tmp_path / "setup.py", models=("some/model",), rows=SampledRows(tmp_path / "rows", 3), seed=1)
    prepare(tmp_path / "generation", begun)
    assert re.search(words, refused(*GENERATE, "--resume", *given)) and not launched
    assert main([*GENERATE, "--resume"]) == 1
    assert launched[0].rows == begun.rows and launched[0].training.seed == 1


def test_an_evaluation_is_no_generation(launched: list[RunPlan], tmp_path: Path, refused: Says) -> None:
    prepare(tmp_path / "generation", planned(tmp_path / "setup.py", models=("some/model",)))
    assert "another kind of run" in refused(*GENERATE, "--resume") and not launched
