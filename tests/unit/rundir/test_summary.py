"""The table at the end of a run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.rundir import paths as runs
from async_grpo.rundir import summary
from async_grpo.rundir.files import write_json
from async_grpo.rundir.lifecycle import prepare
from async_grpo.rundir.paths import RunDir
from kit.plans import planned

FIGURES: dict[str, Any] = {
    "state": runs.FINISHED,
    "run_id": "abc",
    "steps": 100,
    "wall_seconds": 61.4,
    "worker_restarts": 0,
    "rollouts": 12800,
    "rollouts_per_second": 212.345,
    "staleness_mean": 1.234,
    "staleness_max": 3,
    "trainer_wait_fraction": 0.251,
    "worker_busy_fraction": 0.875,
    "jobs_quarantined": 0,
    "groups_dropped": 0,
    "reward_first": 0.25,
    "reward_last": 0.96,
    "accuracy_before": 0.3,
    "accuracy_after": 0.97,
    "checkpoints": "out/checkpoints",
    "tensorboard": "worker/tensorboard",
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(shutil, "which", lambda name: name)  # as after an installation
    prepare(Path("worker"), planned(Path("my_trainer.py"), workers=1))
    Path("out/checkpoints/checkpoint-100").mkdir(parents=True)
    return RunDir(Path("worker"))


Show = Callable[..., str]


@pytest.fixture
def shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> Show:
    """The table of a finished run with these changes; `None`: a figure that it does not have."""

    def show(**changes: Any) -> str:
        figures = {name: value for name, value in {**FIGURES, **changes}.items() if value is not None}
        write_json(run.summary, figures)
        summary.show(run)
        return capsys.readouterr().out

    return show


def test_a_finished_run(shown: Show) -> None:
    text = shown()
    parts = ["run abc finished", "100 in 61 s", "0.250 → 0.960", "0.300 → 0.970", "12800, 212.3 a second"]
    parts += ["mean 1.23, max 3", "25% of the time", "88% of the time", "out/checkpoints", "worker/tensorboard"]
    assert [part for part in [*parts, "next: async-grpo board worker --serve\n"] if part not in text] == []
    assert all(words not in text for words in ("set aside", "dropped", "undecided"))
    assert "none (save_strategy" in shown(checkpoints="out")


def test_the_warning_of_a_run_whose_policy_ran_away_is_repeated(run: RunDir, shown: Show) -> None:
    assert "runs away" not in shown()
    run.update_state(tips="The policy runs away from its rollouts at step 41: …")
    assert "The policy runs away from its rollouts at step 41: …\nnext: " in shown()


def test_a_resumed_run_has_its_totals_apart_from_what_was_done_since(shown: Show) -> None:
    totals, since, folders = re.split("├.*┤", shown(rollouts=5120, resumed_from=60, rollouts_before=7680))
    assert re.search(r"steps +│ 100 ", totals) and re.search(r"rollouts +│ 12800 ", totals)
    assert "0.250 → 0.960" in totals and "staleness" not in totals and " s " not in totals
    assert re.search(r"since the resume at step 60 +│ 40 steps in 61 s \(loading included\)", since)
    assert "5120, 212.3 a second" in since and "max 3" in since
    assert "out/checkpoints" in folders


def test_a_stopped_run_says_how_to_go_on(shown: Show) -> None:
    command = "async-grpo train my_trainer.py --distributed --run-dir worker --resume"
    assert f"next: {command}\n" in shown(state=runs.STOPPED)


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        ({"jobs_quarantined": 3}, r"3, with reasons in \S*quarantine"),
        ({"workers_lost": ["worker 2 (killed by SIGKILL)"]}, r"workers lost at the end .*worker 2 \(killed by S"),
        ({"groups_dropped": 484}, "484, of equal rewards or over age"),
        (
            {"undecided_tokens": 64, "undecided_nats": 0.87123},
            r"trainer and sampler +│ undecided: 64 fresh tokens are too few \(0.87 nats apart\)",
        ),
    ],
)
def test_what_a_run_has_lost_or_left_undecided_is_told(shown: Show, figures: dict[str, Any], told: str) -> None:
    assert re.search(told, shown(**figures))


def test_figures_that_a_run_does_not_have_are_left_out(shown: Show) -> None:
    text = shown(reward_first=None, reward_last=None, accuracy_before=None, accuracy_after=None)
    assert "reward" not in text and "accuracy" not in text
    only_before = shown(accuracy_after=None)
    assert "accuracy" not in only_before and "reward first" in only_before


def test_evaluations_have_the_name_of_their_figure_and_how_they_were_sampled(shown: Show) -> None:
    evaluated = {"evaluated_before": 0.1, "evaluated_after": 0.7, "evaluated_with": "temperature 0.6, top_p 0.95"}
    text = shown(evaluated="reward_mean", accuracy_before=None, accuracy_after=None, **evaluated)
    assert re.search(r"evaluations: mean reward +│ 0.100 → 0.700 ", text)
    assert re.search(r"evaluations sampled with +│ temperature 0.6, top_p 0.95 ", text)
    assert "accuracy" not in text and "success" not in text
    text = shown(evaluated="success_rate", **evaluated)
    assert re.search(r"evaluations: success rate +│ 0.100 → 0.700 ", text) and "accuracy" not in text
    of_set = {"accuracy_before/math": 0.1, "accuracy_after/math": 0.2}
    text = shown(**of_set)
    assert re.search(r"TRL's own evaluations: accuracy +│ 0.300 → 0.970 ", text)
    assert re.search(r"TRL's own evaluations: accuracy of math +│ 0.100 → 0.200 ", text)
    assert "cannot be shown" in shown(**{**of_set, "accuracy_before/math": "0.1"})


def test_a_run_that_was_stopped_before_training_began(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    summary.show(run)
    assert capsys.readouterr().out == "", "without a summary nothing is shown"
    write_json(run.summary, {"state": runs.STOPPED, "worker_restarts": 0, "steps": 0, "run_id": "abc"})
    summary.show(run)
    assert capsys.readouterr().out == "run abc stopped before training began\n"


def test_paths_are_shown_as_they_are(shown: Show) -> None:
    """Square brackets are markup to the library that draws the table."""
    assert "runs/[bold]x[/bold]" in shown(tensorboard="runs/[bold]x[/bold]")


def test_the_launcher_adds_its_figures(run: RunDir) -> None:
    summary.add(run.summary, server_pid=4, worker_restarts=2)
    assert not run.summary.exists(), "the server wrote none, so there is nothing to add to"
    write_json(run.summary, {"server_pid": 4, "steps": 3, "worker_restarts": 0})
    summary.add(run.summary, server_pid=4, worker_restarts=2)
    assert json.loads(run.summary.read_text()) == {"server_pid": 4, "steps": 3, "worker_restarts": 2}
