"""Plans of runs, of the few options that a test is about."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from async_grpo.rundir.run_plan import RunPlan
from async_grpo.settings import CPU, DECLARED, LaunchSettings, TrainingSettings, WorkerSettings


def planned(config: Path = Path("my_trainer.py"), *, workers: int = 0, **options: Any) -> RunPlan:
    """A plan for so many workers on the CPU. `options`: settings by name, and fields of the plan."""
    training, work, launch = (
        kind(**{field.name: options[field.name] for field in fields(kind) if field.name in options})
        for kind in (TrainingSettings, WorkerSettings, LaunchSettings)
    )
    more = {"worker_devices": (CPU,) * workers, **{name: options[name] for name in options if name not in DECLARED}}
    return RunPlan(config=config.absolute(), training=training, work=work, launch=launch, **more)
