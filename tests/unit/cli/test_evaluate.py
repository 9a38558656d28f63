"""What `evaluate` and `generate` refuse before they start, what they plan, and how they tell what they found."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from async_grpo.cli import main
from async_grpo.cli.compute import evaluate
from async_grpo.evals.estimators import Answers, estimates
from async_grpo.evals.eval_ledger import evaluated
from async_grpo.launch import launcher
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from async_grpo.rundir.reading import read_object
from async_grpo.rundir.run_plan import RunPlan, SampledRows
from async_grpo.rundir.shape import shaped
from kit.archived_run import three_steps
from kit.commands import Says
from kit.plans import planned


@pytest.fixture
def setup(tmp_path: Path) -> Path:
    (path := tmp_path / "setup.py").write_text("def get_trainer():\n    raise AssertionError\n")
    return path


@pytest.mark.parametrize("how", ["--resume", "--overwrite"])
def test_an_evaluation_never_continues_or_replaces_a_training_run(
    how: str, setup: Path, tmp_path: Path, refused: Says
) -> None:
    run = three_steps(tmp_path)
    before = sorted(path.relative_to(run.root) for path in run.root.rglob("*"))
    said = refused("evaluate", "some/model", "--config", setup, "--run-dir", run.root, how)
    assert "holds a training run" in said
    assert sorted(path.relative_to(run.root) for path in run.root.rglob("*")) == before


@pytest.fixture
def asked(setup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, see_gpus: Any) -> list[str]:
    """An evaluation that was begun with `--set max_completion_length=8`, asked for again. Nothing may start."""
    prepare(tmp_path / "evaluation", planned(setup, set={"max_completion_length": "8"}))
    see_gpus(0)
    monkeypatch.setattr(launcher, "launch", Mock(side_effect=AssertionError))
    return ["evaluate", "some/model", "--config", str(setup), "--run-dir", str(tmp_path / "evaluation"), "--resume"]


@pytest.mark.parametrize("given", [[], ["--set", "max_completion_length=9"], ["--set", "top_k=3"]])
def test_a_resume_with_other_values_would_mix_two_kinds_of_answers(
    given: list[str], asked: list[str], refused: Says
) -> None:
    assert "was begun with --set max_completion_length=8, and its answers are used" in refused(*asked, *given)


def test_the_same_values_continue_it(asked: list[str]) -> None:
    with pytest.raises(AssertionError):  # of `launch`
        main([*asked, "--set", "max_completion_length=8"])


def test_a_resume_samples_as_the_evaluation_was_begun_where_it_says_nothing(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched: list[RunPlan] = []
    monkeypatch.setattr(launcher, "launch", lambda root, plan: launched.append(plan) or 1)
    run = RunDir(tmp_path / "evaluation")
    values = {"max_completion_length": "8"}
    begun = planned(tmp_path / "setup.py", set=values, eval_k=(1, 5), eval_temperature=0.0, stop_grace=7.0)
    run.update_state(plan=replace(begun, etas=(0.1, "off")))
    assert main([*asked, "--set", "max_completion_length=8", "--eval-top-k", "3"]) == 1
    (plan,) = launched
    assert plan.training == replace(begun.training, eval_top_k=3, resume=True)
    assert plan.etas == (0.1, "off")
    assert "--eval-top-k 3 from now on; the run was begun without this option" in capsys.readouterr().out


def test_a_path_for_the_figures_is_checked_before_they_are_made(
    asked: list[str], tmp_path: Path, refused: Says
) -> None:
    assert "figures.json cannot be written: give a file in a folder that exists" in refused(
        *asked, "--json", tmp_path / "nowhere" / "figures.json"
    )


def test_a_folder_without_weights_is_refused_before_anything_starts(tmp_path: Path, refused: Says) -> None:
    (tmp_path / "setup.py").write_text("def get_trainer(): ...")
    said = refused("evaluate", tmp_path, "--config", tmp_path / "setup.py", "--run-dir", tmp_path / "run")
    assert f"{tmp_path} holds no weights: it has neither config.json nor adapter_config.json" in said


@pytest.mark.parametrize(("rewards", "told"), [([0.0, 1.0], False), ([0.4, 1.0], True)])
def test_success_is_defined_where_no_reward_function_does(rewards: list[float], told: bool) -> None:
    answers = {0: Answers(rewards=rewards, successes=[reward >= 1 for reward in rewards])}
    about = {"run_id": "", "step": 0, "seconds": 0.0, "replicates": 2, "sampling": {}, "first_seq": 0}
    legend = evaluate._legend(evaluated(answers, {}, ks=[1], **about))
    assert ("success: a total reward of at least 1, as no reward function has a success_threshold" in legend) == told


@pytest.mark.parametrize(
    ("replicates", "told"),
    [
        (1, ["reward_mean", "success_rate", "reward_std"]),
        (2, ["reward_mean", "success_rate", "pass@1", "pass_ordered@1", "mean@1", "best@1", "reward_std"]),
    ],
)
def test_with_one_completion_a_problem_each_number_is_told_once(replicates: int, told: list[str]) -> None:
    answers = [Answers(rewards=[share] * replicates, successes=[share > 0.5] * replicates) for share in (0.2, 0.9)]
    assert list(evaluate._each_once(estimates(answers, [1]), replicates, "reward_mean")) == told


# --- What `async-grpo generate` refuses before it starts anything, and what it plans -----------------------------


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
