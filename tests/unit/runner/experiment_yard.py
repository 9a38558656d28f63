"""Experiments of stand-in stages: small scripts that hash their inputs, and append to a counter when they are done."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo_experiments.runner import experiment, states
from async_grpo_experiments.runner.config import ExperimentConfig, checked
from async_grpo_experiments.runner.graph import Stage, graph_of
from async_grpo_experiments.slots.places import Place

STAND_IN = Path(__file__).with_name("stand_in.py")
TWO_PLACES = [Place(name="a"), Place(name="b")]


def tree(**more: Any) -> dict[str, Any]:
    """A matrix of two algorithms, one family, one dataset and two rounds."""
    return {
        "experiment": {"name": "x"},
        "models": {"tiny": {"ref": "reference"}},
        "datasets": {"sums": {}},
        "training": {"datasets": ["sums"]},
        "algos": {"QSharp": {}, "DPO": {"lr": 1e-5}},
        **more,
    }


class ExperimentYard:
    """A folder for one experiment; its stages are stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "outputs" / "x" / "now"

    def command(self, root: Path, stage: Stage, token: str) -> Sequence[str]:
        partial = states.partial_of(root / stage.folder, token)
        needed = [str(root / graph_of(self._config)[name].folder) for name in stage.needs]
        return [sys.executable, str(STAND_IN), str(self.folder), stage.name, str(partial), *needed]

    def run(self, keys: dict[str, Any] | None = None, **more: Any) -> int:
        self._config: ExperimentConfig = checked(keys or tree())
        return experiment.run_experiment(
            self.root, self._config, **{"command": self.command, "only": None, "places": TWO_PLACES, **more}
        )

    def fail(self, stage: str, how: str = "exit") -> None:
        """Have a stage fail once, before it is done.

        Args:
            how: `exit`; `code 77`: exit so; `kill` it; `hang` and say so; `kill-runner`; or `kill-manifest`: kill the
                runner just before the rename.
        """
        (self.folder / f"{stage}.fault").write_text(how)

    def mend(self, stage: str) -> None:
        (self.folder / f"{stage}.fault").unlink(missing_ok=True)

    @property
    def finished(self) -> list[str]:
        """Stages in the order in which they finished; one that did so twice is there twice."""
        counter = self.folder / "counter"
        return counter.read_text().split() if counter.exists() else []

    def hashes(self) -> dict[str, dict[str, str]]:
        """The files of each complete stage."""
        found = {}
        for folder in sorted(self.root.glob("jobs/*/*")):
            if (folder / states.MANIFEST).exists() and ".outdated-" not in folder.name:
                manifest = states.manifest_of(folder)
                assert manifest is not None and not states.damage(folder, manifest)
                found[str(folder.relative_to(self.root))] = manifest.files
        return found

    def job_states(self) -> dict[str, str]:
        states_ = json.loads((self.root / "job_states.json").read_text())
        return {job: found["state"] for job, found in states_.items()}
