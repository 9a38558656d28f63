"""An experiment whose runner is killed in its second round ends as if nothing had happened.

It is resumed from the start: Hydra, which composes a new one, cannot be installed beside `make test`'s antlr.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from async_grpo_experiments.runner import states
from real_experiment import DEADLINE_S, files_of_stages, qsharp_on_ascents

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def finished_part(root: Path, copy: Path) -> Path:
    """A copy of an experiment with what has finished, and nothing of what had begun."""
    copy.mkdir()
    shutil.copyfile(root / "config.yaml", copy / "config.yaml")
    for manifest in root.glob(f"jobs/*/*/{states.MANIFEST}"):
        shutil.copytree(manifest.parent, copy / manifest.parent.relative_to(root))
    return copy


def test_a_kill_of_the_runner_in_the_second_round_changes_nothing(tmp_path: Path) -> None:
    experiment = qsharp_on_ascents(tmp_path)
    root = experiment.begin()
    second = "QSharp_tiny_ascents_r2"
    runner = experiment.start(f"resume_from={root}")
    groups = f"jobs/{second}/generating/done/**/*"
    experiment.until(runner, lambda: [one for one in root.glob(groups) if one.is_file()])
    runner.kill()
    runner.wait()
    unkilled = finished_part(root, tmp_path / "outputs" / "x" / "unkilled")
    assert not list(unkilled.glob(f"jobs/{second}/*"))

    beside = experiment.start(f"resume_from={unkilled}")
    assert experiment.run(f"resume_from={root}") == 0
    experiment.until(beside, lambda: (unkilled / "jobs" / second / "model" / states.MANIFEST).exists())
    beside.send_signal(signal.SIGINT)  # what it evaluates comes of these files
    assert beside.wait(DEADLINE_S) in (0, 130, -signal.SIGINT)  # of the signal itself: Python was at its end
    found = files_of_stages(root)
    compared = [f"{second}.generate", f"{second}.train"]
    assert files_of_stages(unkilled, only=compared) == {name: found[name] for name in compared}

    starts = [line.split()[2] for line in (root / "run.log").read_text().splitlines() if " starts on " in line]
    again = {name for name in starts if starts.count(name) > 1}
    evaluations = {"QSharp_tiny_ascents_r1.evaluate", "reference_tiny_ascents.evaluate"}  # one may run beside it
    assert {f"{second}.generate"} <= again <= {f"{second}.generate", *evaluations}
