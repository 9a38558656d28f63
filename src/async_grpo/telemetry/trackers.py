"""The name, the group and the tags that W&B and trackio show a run under.

transformers' callbacks pass on the name only. W&B reads the rest from the environment, trackio takes it in `init`.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from functools import partial
from typing import Any

from async_grpo.log import logger
from async_grpo.settings import TrainingSettings


def name_for_wandb(settings: TrainingSettings, environ: MutableMapping[str, str]) -> None:
    """Call it before the setup file is loaded, which may begin the run of W&B itself."""
    given = {
        "WANDB_NAME": settings.run_name,
        "WANDB_RUN_GROUP": settings.run_group,
        "WANDB_TAGS": ",".join(settings.run_tags or ()),
    }
    environ.update({name: value for name, value in given.items() if value})


def name_run(trainer: Any, settings: TrainingSettings) -> None:
    """Give the run of a loaded `GRPOTrainer` the name, group and tags of the options, if there are any."""
    if settings.run_name is not None:
        trainer.args.run_name = settings.run_name
    if settings.run_group is None and settings.run_tags is None:
        return
    reports_to = trainer.args.report_to
    if "trackio" in reports_to:
        _name_in_trackio(settings)
    elif "wandb" not in reports_to and "wandb" not in sys.modules:
        logger.warning(
            "--run-group and --run-tags are for W&B and trackio, and report_to of the GRPOConfig names neither: "
            "they have no effect"
        )


def _name_in_trackio(settings: TrainingSettings) -> None:
    import trackio

    named: dict[str, Any] = {"group": settings.run_group}
    if settings.run_tags:  # trackio has no tags; what is in the configuration is a column of its table of runs
        named["config"] = {"tags": list(settings.run_tags)}
    trackio.init = partial(trackio.init, **named)
