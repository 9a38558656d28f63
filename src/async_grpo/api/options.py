"""The options of `async-grpo train` as keywords of the same names, and the flags that they become."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from async_grpo.cli.parser import nearest
from async_grpo.errors import UsageError
from async_grpo.rundir.folders import require_text
from async_grpo.settings import DECLARED, flag_name, read
from async_grpo.setup.grpo_config.values import as_set

NOT_FROM_PYTHON = {
    "config": "it is the first argument, get_trainer",
    "device": "it is for one process: call get_trainer().train() for that",
    "distributed": "every run from Python is distributed",
    "dry_run": "it prints a plan: type `async-grpo train FILE --distributed --dry-run`",
    "gpu_memory": "it is for that plan: type `async-grpo train FILE --distributed --dry-run --gpu-memory 40GB`",
}


class Options(TypedDict, total=False):
    """Each is the option of `async-grpo train` of that name; docs/configuration.md explains them."""

    num_workers: int | None
    master_device_id: int | str | None
    worker_device_ids: Sequence[int | str] | str | None
    accelerate_config: str | Path | None
    machine_rank: int | None
    main_process: str | None
    worker_timeout: float
    ray: str | None
    nodes: int | None
    trainer_nodes: int
    workers_per_node: int | None
    node_wait: float
    node_dir: str | None
    stop_grace: float
    quiet: bool
    overwrite: bool
    log_level: str | None
    # TrainingSettings
    steps: int | None
    seed: int | None
    set: Mapping[str, Any] | None
    run_name: str | None
    run_group: str | None
    run_tags: Sequence[str] | None
    max_staleness: int
    correction: str
    correction_level: str | None
    correction_min: float | None
    correction_max: float | None
    padding: str
    accept_mismatch: bool
    choose_prompts: bool
    filter_zero_variance: bool
    train_of_group: int | None
    weights: Literal["auto", "ipc", "host"]
    deterministic: bool
    max_attempts: int
    keep_done: int | str
    eval_every: int
    no_eval_first: bool
    eval_replicates: int
    eval_k: Sequence[int] | None
    eval_temperature: float | None
    eval_top_p: float | None
    eval_top_k: int | None
    publish_dtype: str | None
    delta_every: int
    delta_keep: int | None
    delta_dir: str | Path | None
    resume: bool
    stall_warning: float
    # WorkerSettings
    groups_per_claim: int | None
    score_concurrency: int | None
    score_alone: bool
    tool_timeout: float
    generator: str | None
    server_devices: Sequence[int] | str | None
    server_timeout: float | None
    in_flight_update: str


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """`{"steps": 5, "resume": True}` -> `["--steps=5", "--resume"]`. None and False are left out.

    Raises:
        UsageError: there is no such option, or the command would refuse its value.
    """
    flags: list[str] = []
    for name, value in options.items():
        if name in NOT_FROM_PYTHON:
            raise UsageError(f"{name} is no option of AsyncGRPO: {NOT_FROM_PYTHON[name]}.")
        if name not in DECLARED:
            raise UsageError(f"AsyncGRPO has no option {name!r}{nearest(name, (*DECLARED, 'workers', 'run_dir'))}")
        is_switch = DECLARED[name].default is False
        if is_switch and not isinstance(value, bool):
            raise UsageError(f"{name} must be True or False, got {value!r}.")
        try:
            for text in _texts(name, value):
                if name != "set" and not is_switch:
                    read(name, text)
                require_text(text)
                flags.append(flag_name(name) if is_switch else f"{flag_name(name)}={text}")
        except ValueError as error:
            raise UsageError(f"{name}={value!r} cannot be: {error}") from error
    return flags


def _texts(name: str, value: Any) -> Iterator[str]:
    """What the command line says for a value: nothing, or one text for each time that the flag is given."""
    if value is None or value is False:
        return
    if name == "set":
        if not isinstance(value, Mapping):
            raise ValueError('it must be a mapping, such as {"learning_rate": 1e-5}')
        yield from (f"{field}={as_set(field, one)}" for field, one in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        yield ",".join(map(str, value))
    else:
        yield str(value)
