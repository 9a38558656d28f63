"""The hyperparameters of a training job: all are text there, and have types here."""

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError
from async_grpo.setup.grpo_config.batch import Batch, BatchError, misfit
from async_grpo.verl_keys.keys import typed

CREDITS = {  # trainer -> credit of TurnGRPOTrainer
    "mt_grpo": "turn",  # MT-GRPO
    "grpo_merged": "merged",  # GRPO-MR: outcome and turn rewards in one sum
    "grpo_outcome": "outcome",  # GRPO-OR: turn rewards are measured and not trained on
    "grpo": "merged",  # the authors' name of GRPO-MR, and with no_turn_reward of GRPO-OR
}
ACCELERATE = ("fsdp2", "zero3")  # how the trainer is sharded, with 3 GPUs or more
TRACKERS = ("none", "wandb", "tensorboard")
OF_THE_SERVICE = "sagemaker_"  # what the service's own SDK adds
RESERVED = "_tuning_objective_metric"


Refused = UsageError  # a sentence for whoever started the job


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    model_name: str = "Qwen/Qwen2.5-7B-Instruct"  # of the hub, or a path; a channel `model` takes its place
    num_gpus: int = 8  # the trainer has all but the last, the worker the last; 0: everything on the CPU
    learning_rate: float = 1e-6
    num_generations: int = 14
    per_device_train_batch_size: int = 2
    grad_accum_steps: int = 4
    num_iterations: int = 2
    max_steps: int = 300
    beta: float = 0.0
    trainer: str = "mt_grpo"  # of CREDITS
    turn_advantage_coef: float = 1.0
    no_turn_reward: bool = False
    max_completion_length: int = 1024
    max_model_len: int = 0  # tokens of a prompt and its completion that vLLM plans for; 0: as many as the model takes
    vllm_gpu_memory_utilization: float = 0.85  # of the worker's GPU, which has no trainer
    accelerate_config: str = "fsdp2"  # of ACCELERATE
    report_to: str = "none"  # of TRACKERS
    save_steps: int = 50
    eval_every: int = 50  # steps; 0: never
    early_stopping_patience: int = 0  # evaluations without improvement that end the training; 0: none do
    early_stopping_threshold: float = 0.0  # of the mean reward; less is no improvement
    seed: int = 42

    def __post_init__(self) -> None:
        if self.num_gpus == 1:
            raise Refused(
                "num_gpus=1: the trainer and the worker's vLLM need a GPU each. Take an instance with at least 2 GPUs, "
                "or num_gpus=0 to try the job on a CPU."
            )
        if self.trainer not in CREDITS:
            raise Refused(f"trainer must be one of {', '.join(CREDITS)}, got {self.trainer!r}.")
        self._refuse_without_use()
        for name, known in (("accelerate_config", ACCELERATE), ("report_to", TRACKERS)):
            if getattr(self, name) not in known:
                raise Refused(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        if not 0 < self.vllm_gpu_memory_utilization <= 1:
            raise Refused(
                f"vllm_gpu_memory_utilization must be over 0 and at most 1, got {self.vllm_gpu_memory_utilization:g}."
            )
        if 0 < self.max_model_len <= self.max_completion_length:
            raise Refused(
                f"max_model_len={self.max_model_len} leaves no room for a prompt beside "
                f"max_completion_length={self.max_completion_length}."
            )
        at_least = {
            **dict.fromkeys(("per_device_train_batch_size", "grad_accum_steps", "num_iterations", "max_steps"), 1),
            "max_completion_length": 1,
            "max_model_len": 0,
            "save_steps": 1,
            "num_gpus": 0,
            "learning_rate": 0,
            "beta": 0,
            "eval_every": 0,
            "early_stopping_patience": 0,
            "early_stopping_threshold": 0,
            "seed": 0,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise Refused(f"{name} must be at least {least}, got {getattr(self, name)}.")
        if self.early_stopping_patience and (self.eval_every == 0 or self.eval_every % self.save_steps):
            raise Refused(
                f"early_stopping_patience={self.early_stopping_patience} needs a checkpoint of each evaluation, as "
                f"the model of the best one is kept: eval_every={self.eval_every} must be a multiple of "
                f"save_steps={self.save_steps}, and not 0."
            )
        batch = self.batch()
        if misfit(batch):
            raise Refused(str(BatchError(batch)).replace("gradient_accumulation_steps=", "grad_accum_steps="))

    def _refuse_without_use(self) -> None:
        if self.no_turn_reward and self.trainer not in ("mt_grpo", "grpo"):
            raise Refused(
                f"no_turn_reward has no use with trainer={self.trainer}: grpo_outcome is the one that trains on no "
                "turn rewards."
            )
        if self.turn_advantage_coef != 1.0 and (self.trainer != "mt_grpo" or self.no_turn_reward):
            what = "no_turn_reward" if self.trainer == "mt_grpo" else f"trainer={self.trainer}"
            raise Refused(
                f"turn_advantage_coef={self.turn_advantage_coef:g} has no use with {what}: it weighs the turn "
                "advantage of mt_grpo."
            )

    @property
    def credit(self) -> str:
        """The `credit` of `TurnGRPOTrainer`."""
        return "outcome" if self.no_turn_reward else CREDITS[self.trainer]

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return max(1, self.num_gpus - 1)

    @property
    def checkpoints_kept(self) -> int:
        """As many as lie between the best evaluation and the end, which is up to an evaluation later than it is due."""
        evaluations = self.early_stopping_patience and self.early_stopping_patience + 1
        return 2 + evaluations * max(1, self.eval_every // self.save_steps)

    def batch(self) -> Batch:
        return Batch(
            per_device_train_batch_size=self.per_device_train_batch_size,
            gradient_accumulation_steps=self.grad_accum_steps,
            steps_per_generation=self.grad_accum_steps,
            generation_batch_size=self.per_device_train_batch_size * self.ranks * self.grad_accum_steps,
            num_generations=self.num_generations,
            processes=self.ranks,
        )


def names() -> list[str]:
    return [field.name for field in dataclasses.fields(Hyperparameters)]


def check_tracker(values: Hyperparameters, env: Mapping[str, str]) -> None:
    """Refuse W&B without a key: the job would wait for somebody who types one."""
    if values.report_to == "wandb" and not env.get("WANDB_API_KEY") and env.get("WANDB_MODE") != "offline":
        raise Refused(
            "report_to=wandb needs WANDB_API_KEY in the environment (launch.py passes it on), or WANDB_MODE=offline."
        )


def read(arguments: Sequence[str], env: Mapping[str, str], root: Path) -> Hyperparameters:
    """Read the file of the service, then SM_HPS, then the command line: the last one counts."""
    found: dict[str, Any] = {}
    file = root / "input" / "config" / "hyperparameters.json"
    if file.is_file():
        found.update(_object(file.read_bytes(), str(file)))
    if env.get("SM_HPS"):
        found.update(_object(env["SM_HPS"], "SM_HPS"))
    found.update(_options(arguments))
    kinds = {field.name: field.type for field in dataclasses.fields(Hyperparameters)}
    values = {}
    for name, value in found.items():
        if name.startswith(OF_THE_SERVICE) or name == RESERVED:
            continue
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f" Did you mean {near[0]}?" if near else f" There are: {', '.join(kinds)}."
            raise Refused(f"There is no hyperparameter {name}.{hint}")
        values[name] = typed(name, value, kinds[name])
    return Hyperparameters(**values)


def _object(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"The hyperparameters in {source} are no JSON: {error}.") from None
    if not isinstance(found, dict):
        raise Refused(f"The hyperparameters in {source} must be an object of names and values.")
    return found


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """`--name value` and `--name=value`; a name alone is true, as for flags."""
    found, rest = {}, list(arguments)
    while rest:
        option = rest.pop(0)
        if not option.startswith("--"):
            raise Refused(f"{option!r} is no option: write --name value.")
        name, equals, value = option[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        found[name.replace("-", "_")] = value
    return found


def environment(values: Hyperparameters) -> dict[str, str]:
    """What the setup file reads."""
    named = {**dataclasses.asdict(values), "checkpoints_kept": values.checkpoints_kept, "credit": values.credit}
    return {**os.environ, **{f"JOB_{name.upper()}": str(value) for name, value in named.items()}}


MAY_CHANGE = ("max_steps", "early_stopping_patience", "early_stopping_threshold")


def check_same_job(values: Hyperparameters, file: Path, *, begun: bool) -> None:
    """Refuse to continue a run with hyperparameters that it was not begun with; keep those of one that begins."""
    if not begun or not file.is_file():
        file.write_text(json.dumps(dataclasses.asdict(values), indent=1) + "\n")
        return
    before = _object(file.read_text(), str(file))
    now = dataclasses.asdict(values)
    if before.get("num_gpus", values.num_gpus) != values.num_gpus:
        raise Refused(
            f"The checkpoints beside {file} are of a job with num_gpus={before['num_gpus']}, and this one has "
            f"num_gpus={values.num_gpus}. A continued run keeps the ranks and the GPUs that it began with: take an "
            f"instance with {before['num_gpus']} GPUs, or another checkpoint folder to start over."
        )
    other = [name for name in now if name not in MAY_CHANGE and name in before and before[name] != now[name]]
    if other:
        changes = ", ".join(f"{name}={now[name]} (was {before[name]})" for name in other)
        raise Refused(
            f"The job that left its checkpoints beside {file} had other hyperparameters: {changes}. A continued run "
            f"keeps those that it began with, so give the same (only {', '.join(MAY_CHANGE)} may change), or another "
            "checkpoint folder to start over."
        )
