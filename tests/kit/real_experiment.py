"""An experiment of real stages in a folder of its own, as a user starts it: with Hydra, or continued without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from async_grpo.rundir.shape import as_json
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import checked
from async_grpo_experiments.runner.config_files import config_of
from async_grpo_experiments.runner.graph import graph_of
from async_grpo_experiments.slots.ledger import LEDGER
from async_grpo_experiments.worlds.enumerable import LETTERS
from async_grpo_experiments.worlds.tiny import endless_transformer, save, words_tokenizer
from kit.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1800.0
SMALL: dict[str, Any] = {"batch_size": 16, "num_workers": 0, "lr": 1e-3, "max_steps": 4}
WITHOUT_CHECKPOINTING = {"micro_batch_size": 16, "gradient_checkpointing": False}


class RealExperiment:
    """`root` is its folder, once it has one."""

    def __init__(self, folder: Path, reference: str, **keys: Any) -> None:
        self.folder = folder
        self._tree = {
            "experiment": {"name": "x"},
            "models": {"tiny": {"ref": reference}},
            "system": {"device": "cpu", "max_parallel_jobs": 2, "deterministic": True},
            "data_collection": {"max_examples": 12},
            "evaluation": {"num_samples": 2, "max_examples": 6, "etas": [0.3]},
            **keys,
        }

    def write_conf(self) -> RealExperiment:
        """Write ./conf, from which Hydra composes the configuration of a new experiment."""
        (self.folder / "conf").mkdir()
        (self.folder / "conf" / "config.yaml").write_text(yaml.safe_dump(self._tree))
        return self

    def begin(self) -> Path:
        """Write what an experiment has that was stopped before its first stage: it is resumed without Hydra."""
        root = self.folder / "outputs" / "x" / "begun"
        root.mkdir(parents=True)
        (root / "config.yaml").write_text(yaml.safe_dump(as_json(checked(self._tree))))
        return root

    @property
    def root(self) -> Path:
        (found,) = [path.parent for path in self.folder.glob(f"outputs/x/*/{LEDGER}")]
        return found

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "async_grpo.cli", "experiment", *arguments]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        return subprocess.Popen(command, cwd=self.folder, env=env)

    def run(self, *arguments: str) -> int:
        return self.start(*arguments).wait(DEADLINE_S)

    def until(self, runner: subprocess.Popen[bytes], condition: Callable[[], Any]) -> Any:
        """The first true result of `condition`, while the runner lives."""
        ledgers = partial(self.folder.glob, f"outputs/x/*/{LEDGER}")
        return until(lambda: [*ledgers()] and condition(), "the stage", deadline_s=DEADLINE_S, process=runner)


def qsharp_on_ascents(folder: Path, **keys: Any) -> RealExperiment:
    """Two rounds of Q# with a random transformer."""
    tokenizer = words_tokenizer(LETTERS)
    return RealExperiment(
        folder,
        save(folder / "reference", endless_transformer(tokenizer), tokenizer),
        datasets={"ascents": {}},
        training={"datasets": ["ascents"], **WITHOUT_CHECKPOINTING},
        generation={"max_new_tokens": 5},
        algos={"QSharp": {**SMALL, "loss_type": "bce", "guidance": {"mode": "bernoulli"}}},
        **keys,
    )


def all_stages_have_finished(root: Path) -> None:
    for name, stage in graph_of(config_of(root)).items():
        manifest = states.manifest_of(root / stage.folder)
        assert manifest is not None and not states.damage(root / stage.folder, manifest), name
