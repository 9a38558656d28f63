"""What the command line decides about a run. Each setting is declared once: its flag, its default and its help."""

from __future__ import annotations

import math
import os
import re
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeAlias

from async_grpo.errors import AsyncGRPOError, UsageError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_LIMIT = re.compile(r"(\d+)\s*(KB|MB|GB|TB)?", re.IGNORECASE)


def memory_size(text: str) -> int:
    """Bytes of `"40GB"`, in powers of ten. Raises `ArgumentTypeError` for anything else."""
    match = _LIMIT.fullmatch(text.strip())
    if match is None or not match[2] or not int(match[1]):
        raise ArgumentTypeError(f"must be a size such as 40GB, got {text!r}")
    return int(match[1]) * _UNITS[match[2].upper()]


@dataclass(frozen=True, slots=True)
class ArchiveLimit:
    """Keep at most this many groups, or this many bytes of them, the newest first."""

    amount: int
    in_bytes: bool = False

    @classmethod
    def parse(cls, text: str) -> ArchiveLimit:
        """`"10000"` groups, or `"2GB"`. Raises `UsageError` for anything else."""
        match = _LIMIT.fullmatch(text.strip())
        if match is None:
            raise UsageError(f"--keep-done must be a number of groups or a size such as 500MB or 2GB, got {text!r}.")
        amount, unit = match.groups()
        return cls(int(amount) * _UNITS[unit.upper()], in_bytes=True) if unit else cls(int(amount))

    def __str__(self) -> str:
        return f"{self.amount // 1000}KB" if self.in_bytes else str(self.amount)

    def groups(self, done: Path) -> int:
        """How many of the groups in `done` may stay of each kind, the newest first."""
        if not self.in_bytes:
            return self.amount
        left, kept = self.amount, 0
        files = sorted(done.glob("*/*"), key=lambda path: path.name, reverse=True)
        # As many groups of evaluations, whose numbers begin with 9, stay beside those that are trained on.
        kinds = ([file for file in files if file.name.startswith("9") is is_eval] for is_eval in (False, True))
        for pair in zip_longest(*kinds):
            left -= sum(file.stat().st_size for file in pair if file is not None)
            if left < 0:
                break
            kept += 1
        return kept


DEFAULT_LIMIT = ArchiveLimit(10_000)
DEFAULT_KS = (1, 5, 10)
EVAL_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}  # of evaluations, where nobody says otherwise
Eta: TypeAlias = float | Literal["off"]  # strength of guidance, in units of the reward; off: none
SEEDS = range(2**32)
GENERATORS = ("hf", "vllm", "vllm-server")
CORRECTIONS = ("bypass", "decoupled", "tis", "icepop", "trl", "none")
CPU = "cpu"  # as a device
Way = Literal["auto", "ipc", "host"]  # of publishing weights
NO_PADDING, PADDING_OF_TRL = PADDINGS = ("none", "trl")
CORRECTION_LEVELS = ("token", "sequence", "geometric")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
STALL_WARNING_S = 60.0
STOP_GRACE_S = 9.0  # a run ends within 10 s


def positive(text: str) -> int:
    return _at_least(text, 1)


def not_negative(text: str) -> int:
    return _at_least(text, 0)


def not_negative_number(text: str) -> float:
    return _number_in(text, 0.0, math.inf)


def seed_number(text: str) -> int:
    if not text.isdecimal() or int(text) not in SEEDS:
        raise ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, as numpy takes no others, got {text!r}")
    return int(text)


def share(text: str) -> float:
    if not (number := _number_in(text, 0.0, 1.0)):
        raise ArgumentTypeError("must be over 0, and at most 1")
    return number


def absolute(folder: str) -> str:
    """As a resume may be started in another folder."""
    return str(Path(folder).expanduser().absolute())


def file_or_none(text: str) -> Path | None:
    return None if text == "none" else Path(text)


def comma_separated(text: str) -> tuple[int, ...]:
    """`1,5,10` as numbers."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def name(text: str) -> str:
    """A name for people, in one line. It may not begin with `-`: it is passed on as the value of a flag."""
    stripped = text.strip()
    if not stripped or stripped.startswith("-") or not stripped.isprintable():
        raise ArgumentTypeError(f"must be a name in one line that does not begin with '-', got {text!r}")
    return stripped


def names(text: str) -> tuple[str, ...]:
    """`baseline,seed 3` as names."""
    return tuple(name(part) for part in text.split(","))


def _number(text: str) -> float:
    """NaN where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _number_in(text: str, least: float, most: float) -> float:
    number = _number(text)
    if not (least <= number <= most and math.isfinite(number)):
        bound = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ArgumentTypeError(f"must be a number {bound}, got {text!r}")
    return number


def etas(text: str) -> tuple[Eta, ...]:
    """`0.1,0.2,off`"""
    found = tuple(_eta(part.strip()) for part in text.split(","))
    if len(set(found)) < len(found):
        raise ArgumentTypeError(f"names a strength twice: {text!r}")
    return found


def _eta(text: str) -> Eta:
    if text == "off":
        return "off"
    if not 0 < (number := _number(text)) < math.inf:
        raise ArgumentTypeError(f"must be over 0, in units of the reward, got {text!r}; off is no guidance")
    return number


def positive_seconds(text: str) -> float:
    if not 0 < (seconds := _number(text)) < math.inf:
        raise ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds


def address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    return text


def _at_least(text: str, least: int) -> int:
    if not text.lstrip("-").isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"must be a whole number of at least {least}, got {text!r}")
    return int(text)


def assignment(text: str) -> tuple[str, str]:
    """`NAME=VALUE` in its parts."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise ArgumentTypeError(f"must be NAME=VALUE, such as learning_rate=1e-5, got {text!r}")
    return name.strip(), value


class Assign(Action):
    """Collects `assignment`s by name; the last of a name counts."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option: str | None = None) -> None:
        earlier = getattr(namespace, self.dest)
        name, value = values
        setattr(namespace, self.dest, {**(earlier if isinstance(earlier, dict) else {}), name: value})


def setting(default: Any, help: str, **argument: Any) -> Any:
    """A field with its flag: `argument` and the help are for `argparse.add_argument`."""
    return field(default=default, metadata={"help": help, **argument})


def stall_warning() -> Any:
    what = "a process without progress for S seconds logs what it waits for, since when and on which process"
    return setting(STALL_WARNING_S, f"{what} (default: 60)", type=positive_seconds, metavar="S")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """For the parameter server. Each field is a flag of the same name."""

    steps: int | None = setting(None, "optimizer steps; overrides max_steps of the setup file", type=positive)
    seed: int | None = setting(None, "overrides the seed of the setup file", type=seed_number)
    set: dict[str, str] | None = setting(  # noqa: RUF009, it is frozen
        None,
        "a field of the setup file's GRPOConfig, such as learning_rate=1e-5; may be given several times",
        action=Assign,
        type=assignment,
        metavar="NAME=VALUE",
    )
    run_name: str | None = setting(
        None, "name of the run in W&B and trackio; overrides run_name of the setup file", type=name, metavar="NAME"
    )
    run_group: str | None = setting(
        None, "group of runs that this one belongs to in W&B and trackio", type=name, metavar="NAME"
    )
    run_tags: tuple[str, ...] | None = setting(
        None, "tags of the run in W&B and trackio", type=names, metavar="TAG,TAG"
    )
    max_staleness: int = setting(
        4,
        "maximum age of a rollout in policy versions when it is trained on; 0 is the synchronous schedule (default: 4)",
        type=not_negative,
        metavar="K",
    )
    correction: str = setting(
        "bypass",
        "how the loss corrects for stale rollouts (default: bypass, PPO's clip against the sampler)",
        choices=CORRECTIONS,
    )
    correction_level: str | None = setting(
        None,
        "ratio that decoupled, tis and icepop weigh by: each token's own, the product over the sequence, or its "
        "geometric mean (default: token)",
        choices=CORRECTION_LEVELS,
    )
    correction_min: float | None = setting(
        None,
        "smallest weight: decoupled and icepop drop smaller ones, tis raises them (default: that of the correction)",
        type=not_negative_number,
        metavar="W",
    )
    correction_max: float | None = setting(
        None,
        "largest weight: decoupled and icepop drop larger ones, tis lowers them (default: that of the correction)",
        type=not_negative_number,
        metavar="W",
    )
    padding: str = setting(
        NO_PADDING,
        "none: padding is not computed in a training step; trl: it is, as TRL does (default: none)",
        choices=PADDINGS,
    )
    accept_mismatch: bool = setting(
        False, "train on, with a warning, where trainer and sampler disagree on rollouts of the same weights"
    )
    choose_prompts: bool = setting(False, "draw rows by the chance that the rewards of their group differ")
    filter_zero_variance: bool = setting(False, "replace groups whose rewards are all equal by new ones (DAPO)")
    train_of_group: int | None = setting(
        None,
        "train on the M completions of each group whose rewards differ most; advantages are of all (default: all)",
        type=positive,
        metavar="M",
    )
    weights: Way = setting(  # noqa: RUF009, it is frozen
        "auto",
        "memory that a server on a GPU publishes its weights in: its GPU's (ipc), or the host's, for workers whose GPU "
        "cannot reach it (default: auto, the GPU's where all workers can reach it)",
        choices=("auto", "ipc", "host"),
    )
    deterministic: bool = setting(False, "the same seed gives the same run on this machine, bit for bit")
    max_attempts: int = setting(
        3, "attempts at a failing job before it is set aside (default: 3)", type=positive, metavar="N"
    )
    keep_done: ArchiveLimit = setting(  # noqa: RUF009, it is frozen
        DEFAULT_LIMIT,
        "keep at most N used groups, or at most this many bytes of them (2GB), in done/ (default: 10000)",
        type=ArchiveLimit.parse,
        metavar="N",
    )
    eval_every: int = setting(
        40,
        "evaluate on the setup file's eval_dataset before the first step, every N optimizer steps and at the end; "
        "0: never (default: 40)",
        type=not_negative,
        metavar="N",
    )
    no_eval_first: bool = setting(False, "no evaluation before the first step")
    eval_replicates: int = setting(
        5, "completions of each problem in an evaluation (default: 5)", type=positive, metavar="N"
    )
    eval_k: tuple[int, ...] | None = setting(
        None,
        "the k of pass@k and the others, e.g. 1,5,10; none may be over --eval-replicates (default: those of 1,5,10 "
        "that are not)",
        type=comma_separated,
        metavar="K,K",
    )
    eval_temperature: float | None = setting(
        None,
        "sampling temperature in evaluations; 0: greedy (default: 0.6; where guided, that of the head)",
        type=not_negative_number,
        metavar="T",
    )
    eval_top_p: float | None = setting(
        None, "top_p in evaluations; 1: off (default: 0.95; where guided, 1)", type=share, metavar="P"
    )
    eval_top_k: int | None = setting(
        None, "top_k in evaluations; 0: off (default: 20; where guided, 0)", type=not_negative, metavar="K"
    )
    publish_dtype: str | None = setting(
        None,
        "dtype in which floating-point weights are published, and so kept by --delta-every (default: as they train)",
        choices=("bf16",),
    )
    delta_every: int = setting(
        0,
        "keep every N-th version of the weights, as its exact difference from the one before; 0: none (default: 0)",
        type=not_negative,
        metavar="N",
    )
    delta_keep: int | None = setting(
        None,
        "delete the oldest kept versions, but keep the newest N at least (default: keep all)",
        type=positive,
        metavar="N",
    )
    delta_dir: str | None = setting(
        None, "folder of the kept versions (default: checkpoints/deltas_RUN)", type=absolute, metavar="DIR"
    )
    resume: bool = setting(False, "continue the unfinished run in --run-dir")
    stall_warning: float = stall_warning()

    def eval_sampling(self, otherwise: Mapping[str, Any] = EVAL_SAMPLING) -> dict[str, Any]:
        """As `Job.sampling` has it; `otherwise` has what the options do not say."""
        given = {"temperature": self.eval_temperature, "top_p": self.eval_top_p, "top_k": self.eval_top_k}
        return {name: otherwise[name] if value is None else value for name, value in given.items()}

    def check(self) -> None:
        """Refuse options that contradict each other, or that something is missing for. `UsageError` says which."""
        self.evaluated_ks()
        given = {"--delta-keep": self.delta_keep, "--delta-dir": self.delta_dir}
        if not self.delta_every and (unused := [flag for flag, value in given.items() if value is not None]):
            raise UsageError(f"{', '.join(unused)}: no versions are kept without --delta-every. Give it as well.")

    def evaluated_ks(self) -> tuple[int, ...]:
        """The k of pass@k. `UsageError` if one is larger than the number of completions."""
        if self.eval_k is None:
            return tuple(k for k in DEFAULT_KS if k <= self.eval_replicates)
        if max(self.eval_k) > self.eval_replicates:
            raise UsageError(
                f"--eval-k {max(self.eval_k)} needs at least as many completions of each problem, and "
                f"--eval-replicates is {self.eval_replicates}. Raise --eval-replicates, or leave that k out."
            )
        return self.eval_k


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """For a rollout worker. Each field is a flag of the same name."""

    groups_per_claim: int | None = setting(
        None,
        "prompt groups that a worker generates in one batch (default: auto, an even share of what is pending)",
        type=lambda text: None if text == "auto" else positive(text),
        metavar="auto|N",
    )
    score_concurrency: int | None = setting(
        None, "calls of rewards at a time (default: 1; 4 if all are async or thread_safe)", type=positive, metavar="N"
    )
    score_alone: bool = setting(False, "call reward functions with one prompt group, not with all that wait")
    tool_timeout: float = setting(
        30.0,
        "a tool call that takes longer is given up, and the model reads an error; an agent that asks its endpoint for "
        "nothing so long is given up, too (default: 30)",
        type=positive_seconds,
        metavar="S",
    )
    stall_warning: float = stall_warning()
    generator: str | None = setting(
        None,
        "what the workers generate with: transformers, vLLM with continuous batching, or a vLLM server that each "
        "worker starts (default: vllm where the setup file says use_vllm=True, or it is installed and there is a GPU; "
        "else hf)",
        choices=GENERATORS,
    )
    server_devices: str | None = setting(
        None,
        "vllm-server only. GPUs of the server, such as 1,2 for vllm_tensor_parallel_size=2 (default: the worker's)",
        metavar="N,N",
    )
    server_timeout: float | None = setting(
        None,
        "vllm-server only. A server that does not answer within S seconds of its start is given up (default: 300)",
        type=positive_seconds,
        metavar="S",
    )
    in_flight_update: str = setting(
        "off",
        "vllm only. off: groups are finished with the weights that began them; on: they continue with new weights "
        "as soon as there are any (default: off)",
        choices=("off", "on"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSettings:
    """For the launcher: which processes there are, on which devices, and how they end. Each field is a flag."""

    num_workers: int | None = setting(
        None,
        "default: one for each GPU besides the server's, 2 on a CPU; 0 with --ray: only on other machines",
        type=not_negative,
        metavar="N",
    )
    master_device_id: str | None = setting(None, "the server's GPU, or 'cpu' (default: 0)", metavar="N")
    worker_device_ids: str | None = setting(None, "the workers' GPUs, one worker each", metavar="1,2,3")
    accelerate_config: Path | None = setting(  # noqa: RUF009, it is frozen
        None,
        "the trainer spans several processes, as this file of `accelerate config` says (examples/accelerate/); none: "
        "it is one process from now on, with --resume",
        type=file_or_none,
        metavar="FILE",
    )
    machine_rank: int | None = setting(
        None,
        "which machine of the trainer this is, where the accelerate configuration has several (num_machines); the same "
        "command runs on each (default: the file's machine_rank)",
        type=not_negative,
        metavar="R",
    )
    main_process: str | None = setting(
        None,
        "address of machine 0 that the others reach (default: the file's main_process_ip and main_process_port)",
        type=address,
        metavar="HOST:PORT",
    )
    worker_timeout: float = setting(
        600.0,
        "a worker with a job that decodes no token and scores no group for S seconds is killed and started again "
        "(default: 600)",
        type=positive_seconds,
        metavar="S",
    )
    stop_grace: float = setting(
        STOP_GRACE_S,
        "after Ctrl-C or SIGTERM the server has S seconds to finish its step and write a checkpoint; then it is "
        "killed (default: 9)",
        type=positive_seconds,
        metavar="S",
    )
    ray: str | None = setting(
        None,
        "workers on other machines, which Ray reaches: auto (RAY_ADDRESS, or the cluster that this machine is in), "
        "local (a cluster of this machine alone, to try it), or HOST:PORT",
        metavar="auto|local|HOST:PORT",
    )
    nodes: int | None = setting(
        None, "with --ray: machines, the server's included (default: all of the cluster)", type=positive, metavar="N"
    )
    trainer_nodes: int = setting(
        1,
        "with --ray: machines of the trainer, this one and others on which Ray starts ranks, as many as the accelerate "
        "configuration has (num_machines) (default: 1)",
        type=positive,
        metavar="N",
    )
    workers_per_node: int | None = setting(
        None,
        "with --ray: workers on each other machine (default: one for each GPU, else 2)",
        type=positive,
        metavar="N",
    )
    node_wait: float = setting(
        60.0, "seconds that the start waits for other machines (default: 60)", type=positive_seconds, metavar="S"
    )
    node_dir: str | None = setting(
        None, "with --ray: folder on a local disk of each node for its run directory (default: $TMPDIR)", metavar="DIR"
    )
    quiet: bool = setting(False, "show only warnings, errors and the table at the end")
    overwrite: bool = setting(False, "delete the unfinished run in --run-dir (checkpoints stay)")
    log_level: str | None = setting(None, "default: $LOG_LEVEL, else INFO", type=str.upper, choices=LOG_LEVELS)


def log_level(given: str | None) -> str:
    """The level from the option, else from `LOG_LEVEL`, else INFO."""
    level = (given or os.environ.get("LOG_LEVEL") or "INFO").upper()
    if level not in LOG_LEVELS:
        raise UsageError(f"LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, got {level!r}.")
    return level


DECLARED = {entry.name: entry for kind in (TrainingSettings, WorkerSettings, LaunchSettings) for entry in fields(kind)}
"""Every setting of a distributed run, by its name."""


def read(name: str, text: str) -> Any:
    """The value that `text` is for the flag of a setting. `ValueError`: it is none."""
    declared = DECLARED[name].metadata
    try:
        value = declared.get("type", str)(text)
    except (ArgumentTypeError, AsyncGRPOError) as error:
        raise ValueError(str(error)) from error
    if value not in (choices := declared.get("choices", (value,))):
        raise ValueError(f"it must be one of {', '.join(choices)}")
    return value


def as_flags(name: str, value: Any) -> list[str]:
    """The flags that give a setting a value: `("seed", 3)` -> `["--seed", "3"]`."""
    if isinstance(value, Mapping):
        return as_sets(value)
    if value is None or isinstance(value, bool):
        return [flag_name(name)] if value else []
    return [flag_name(name), ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]


def as_sets(values: Mapping[str, str]) -> list[str]:
    """Fields of the `GRPOConfig` as flags: `{"beta": "0.1"}` -> `["--set", "beta=0.1"]`."""
    return [text for name, value in values.items() for text in ("--set", f"{name}={value}")]


def flag_name(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
