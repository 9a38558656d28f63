"""What a run left in its directory, as tables. Reads files only, until a model is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.archive.output_dir import newest_checkpoint
from async_grpo.evals import eval_ledger
from async_grpo.rundir import summary
from async_grpo.rundir.paths import RunDir
from async_grpo.telemetry import entries


class Result:
    """A run's files. A table is a pandas `DataFrame`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._run = RunDir(run_dir)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; empty before training began."""
        return summary.read(self._run.summary)

    @property
    def metrics(self) -> Any:
        """`metrics.jsonl`: a row an optimizer step, the newest where a resumed run has trained it again."""
        return table([row for row in entries.read(self._run.metrics) if "loss" in row])

    @property
    def evaluations(self) -> Any:
        """`evaluations.jsonl`: a row an evaluation, with `NAME`, `NAME_low` and `NAME_high` of each figure."""
        return table([_evaluation(one) for one in eval_ledger.read(self._run.evaluations)])

    def rollouts(self, *, step: int | None = None, limit: int | None = None) -> Any:
        """A row a completion, the newest first: prompt, text, rewards; of one optimizer step if asked."""
        from async_grpo.archive.groups import FinishedGroups
        from async_grpo.reports.rollouts import select

        selection = select(FinishedGroups(self.run_dir), step=step, limit=limit)
        return table([_rollout(one) for one in selection.rollouts])

    @property
    def checkpoint(self) -> Path:
        """The newest complete checkpoint. `RunDirError` where there is none."""
        return newest_checkpoint(self.run_dir)

    def model(self, device: str = "cpu") -> Any:
        """The model as training left it, loaded by transformers, adapters with their base.

        It is that of the newest checkpoint, or of `last_weights/` where training ended after the last checkpoint.
        """
        from async_grpo.roles.chat import load

        weights = self._run.last_weights
        return load(weights if weights.is_dir() else self.checkpoint, device)[0]

    def __repr__(self) -> str:
        figures = self.summary
        return f"<result in {self.run_dir}: {figures.get('state', 'no summary')}, {figures.get('steps', 0)} steps>"


def table(rows: Sequence[dict[str, Any]]) -> Any:
    import pandas  # which `datasets` needs as well

    return pandas.DataFrame(rows)


def _evaluation(one: eval_ledger.Evaluated) -> dict[str, Any]:
    row: dict[str, Any] = {"step": one.step, "seconds": one.seconds, "replicates": one.replicates}
    for name, figure in one.figures.items():
        row |= {name: figure.value, f"{name}_low": figure.low, f"{name}_high": figure.high}
    return row


def _rollout(one: Any) -> dict[str, Any]:
    group = one.found.group
    return {
        "step": one.found.fate.step,
        "group": group.job.seq,
        "policy_version": group.policy_version,
        "worker": group.worker,
        "prompt": group.prompt(one.index),
        "completion": group.completions[one.index],
        "reward": one.total,
        **{f"reward/{name}": value for name, value in one.rewards.items()},
        "advantage": one.advantage,
        "tokens": one.length,
    }
