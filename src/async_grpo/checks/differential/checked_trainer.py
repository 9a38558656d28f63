"""The user's trainer, built in each process of a check. A generated setup file calls it as its `get_trainer()`."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_grpo.errors import UnsupportedError
from async_grpo.records import distinct
from async_grpo.rundir.files import write_json
from async_grpo.setup.generated import GENERATED
from async_grpo.setup.sampling import refuse_guided

STEPS = 2
FACTS, OUTPUT, RUN = "facts.json", "output", "run"  # in the scratch folder
_CONFIG = {
    "report_to": "none",
    "push_to_hub": "False",
    "log_completions_hub_repo": "none",
    "eval_strategy": "no",
    "eval_on_start": "False",
    "load_best_model_at_end": "False",
    "logging_strategy": "steps",
    "logging_steps": "1",
    "logging_first_step": "False",
}
_TINY = {"bf16": "False", "fp16": "False", "max_completion_length": "64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The command line's decisions about a check, which each of its processes is given."""

    config: str  # path of the user's file
    device: str  # "cpu" or a GPU index
    seed: int
    tiny: bool = False
    scratch: str = ""  # folder that the check makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    trainer: str
    model: str
    parameters: int
    rewards: list[str]
    completions: int  # that each side needs for all steps
    group_size: int
    batches: int  # generation batches of all steps
    precision: str
    dropout: str  # a sentence; empty without


def setup_file(options: CheckOptions) -> Path:
    path = Path(options.scratch) / "setup_of_check.py"
    path.write_text(
        f"{GENERATED}from async_grpo.checks.differential.checked_trainer import CheckOptions, run_trainer\n\n\n"
        f"def get_trainer():\n    return run_trainer(CheckOptions(**{asdict(options)!r}))\n"
    )
    return path


def run_trainer(options: CheckOptions) -> Any:
    """The user's trainer in a process of the run."""
    from async_grpo.checks.differential.recorder import recorded_run

    scratch = Path(options.scratch)
    trainer = user_trainer(options, scratch / OUTPUT / RUN)
    recorded_run(trainer, scratch)
    if not (scratch / FACTS).exists():
        write_json(scratch / FACTS, asdict(_facts(trainer)))
    return trainer


def user_trainer(options: CheckOptions, output_dir: Path, **loading: Any) -> Any:
    """The trainer as `load_trainer` builds it, but for what it reports and where it writes.

    Raises:
        UnsupportedError: it cannot be checked.
    """
    from async_grpo.checks.differential.tiny import cut_down
    from async_grpo.setup.grpo_config.building import configurations_with
    from async_grpo.setup.setup_file import load_trainer

    values = {**_CONFIG, "output_dir": str(output_dir), **(_TINY if options.tiny else {})}
    with cut_down() if options.tiny else nullcontext(), configurations_with(values):
        trainer = load_trainer(Path(options.config), **loading)
    trainer.args.output_dir = str(output_dir)
    trainer.reward_func_names = distinct(trainer.reward_func_names)  # lines and notes name each function
    refuse(trainer)
    return trainer


def refuse(trainer: Any) -> None:
    """Raise `UnsupportedError` for what cannot be compared."""
    refuse_guided(trainer)
    if trainer.args.world_size > 1:
        raise UnsupportedError("The check is for a trainer of one process: run it without `accelerate launch`.")
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "best":
        raise UnsupportedError('save_strategy="best" needs evaluations, and a check makes none: set another one.')


def _facts(trainer: Any) -> Facts:
    from async_grpo.training.corrections.checks import describe_noise

    args = trainer.args
    passes = args.steps_per_generation * trainer.num_iterations
    batches = -(-STEPS * args.gradient_accumulation_steps // passes)
    half = "bf16" if args.bf16 else "fp16" if args.fp16 else ""
    return Facts(
        trainer=type(trainer).__name__,
        model=type(trainer.model).__name__,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        rewards=list(trainer.reward_func_names),
        completions=batches * args.generation_batch_size,
        group_size=trainer.num_generations,
        batches=batches,
        precision=half or str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        dropout=describe_noise(trainer),
    )
