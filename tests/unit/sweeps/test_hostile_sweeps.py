"""Files of a sweep that somebody else wrote, or that say what no run says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.api.notebook import Panel
from async_grpo.errors import RunDirError
from async_grpo.reports.series import logged
from async_grpo_experiments.slots.ledger import FINISHED, LEDGER, Record
from async_grpo_experiments.sweeps import plan
from async_grpo_experiments.sweeps.plan import Sweep
from async_grpo_experiments.sweeps.run_progress import curves
from kit.commands import Says

HUGE = "1" + "0" * 400


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two finished runs."""
    (setup := tmp_path / "my_trainer.py").write_text("def get_trainer(): ...\n")
    made = Sweep(setup=str(setup), seeds=(1, 2), name="mine", output_base=str(tmp_path / "outputs"))
    made.folder.mkdir(parents=True, mode=0o700)
    plan.write(made)
    records = [Record(task=run.name, state=FINISHED) for run in made.runs]
    lines = [json.dumps({"task": record.task, "state": record.state}) for record in records]
    (made.folder / LEDGER).write_text("\n".join(lines) + "\n")
    for run in made.runs:
        run.run_dir.mkdir(parents=True)
    return made


@pytest.mark.parametrize("values", [{"0": [1.0], "1": []}, {"0": [1.0, 1.0, 1.0]}, {"0": 3, "1": "x"}])
def test_values_by_problem_that_are_no_pairs_are_left_out(sweep: Sweep, values: dict[str, Any], refused: Says) -> None:
    figure = {"value": 1.0, "low": None, "high": None, "problems": 2}
    line = {"run_id": "r", "step": 1, "seconds": 1.0, "replicates": 1, "sampling": {}, "first_seq": 0}
    for run in sweep.runs:
        found = {**line, "figures": {"success_rate": figure}, "tasks": {}, "failed": {}, "by_problem": values}
        (run.run_dir / "evaluations.jsonl").write_text(json.dumps(found) + "\n")
    assert "no evaluation in common" in refused("compare", sweep.folder, sweep.folder)


def test_numbers_of_hundreds_of_digits_are_left_out(sweep: Sweep) -> None:
    run = sweep.runs[0]
    lines = [f'{{"step":1,"loss":1,"reward":{HUGE}}}', f'{{"step":1,"eval_reward":{HUGE}}}']
    (run.run_dir / "metrics.jsonl").write_text("\n".join([*lines, '{"step":2,"loss":1,"reward":0.5}\n']))
    assert curves(run).reward == {2: 0.5}
    (panel := Panel(run.run_dir))._read()
    assert panel._rewards == {2: 0.5}
    assert dict(logged(json.loads(lines[0]))) == {"train/loss": 1.0}


def _others_may_write(folder: Path) -> Path:
    folder.chmod(0o777)
    return folder


def _through_a_link(folder: Path) -> Path:
    (link := folder.parent / "sweep_link").symlink_to(folder)
    return link


def _planted(folder: Path) -> Path:
    """Its record names a folder that would be made new, and so belong to whoever continues the sweep."""
    planted = folder.parent / "planted"
    planted.mkdir(mode=0o700)
    record = json.loads((folder / "sweep.json").read_text())
    (planted / "sweep.json").write_text(json.dumps({**record, "name": "x/../../elsewhere"}))
    return planted


@pytest.mark.parametrize("plant", [_others_may_write, _through_a_link, _planted])
def test_a_sweep_that_others_could_have_written_is_not_continued(
    sweep: Sweep, plant: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setattr(
        "async_grpo_experiments.sweeps.sweep.run_sweep", lambda *_, **__: pytest.fail("it was continued")
    )
    told = refused("sweep", str(plant(sweep.folder)), "--resume")
    assert told.startswith("error: ") and "--run-dir" not in told, "a sweep has no such option"


@pytest.mark.parametrize("wrong", [{"seeds": [1, -1]}, {"seeds": [1, 2**32]}, {"arguments": []}])
def test_a_record_with_no_seed_or_of_a_former_version_is_refused(sweep: Sweep, wrong: dict[str, Any]) -> None:
    record = json.loads((sweep.folder / "sweep.json").read_text())
    (sweep.folder / "sweep.json").write_text(json.dumps({**record, **wrong}))
    with pytest.raises(RunDirError, match=r"is no seed: one is from 0 to|has an unknown field 'arguments'"):
        plan.load(sweep.folder)


def test_a_sweep_is_found_from_within_its_own_folder(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sweep.folder)
    (sweep.folder / "tensorboard").mkdir()
    for folder in (Path(), Path("tensorboard/..")):
        found = plan.own(plan.find(folder))
        assert (found.folder, found.runs[0].output) == (sweep.folder, sweep.runs[0].output)


def test_a_sweep_whose_folder_was_renamed_is_refused_by_either_name_with_what_to_do(
    sweep: Sweep, refused: Says
) -> None:
    renamed = sweep.folder.rename(sweep.folder.with_name("old"))
    for command, words in (
        ([renamed], f"beside its runs: rename it to {sweep.folder}, then continue."),
        ([sweep.folder], f"{sweep.folder} does not exist: neither a sweep's folder nor a setup file"),
        ([sweep.setup, "--output-base", sweep.folder.parent], "sweep_my_trainer does not exist. Name the folder that"),
    ):
        assert words in refused("sweep", *command, "--resume")
