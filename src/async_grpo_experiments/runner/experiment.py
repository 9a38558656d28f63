"""An experiment from its start to its results: look what is there, run what is not, sum up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from async_grpo.errors import BadFileError, DiskFullError, UsageError
from async_grpo.formatting import counted, size
from async_grpo.launch.child_log import last_line
from async_grpo.rundir.shape import as_json, shaped
from async_grpo.setup.devices import visible_gpus
from async_grpo_experiments.runner import states
from async_grpo_experiments.runner.config import OWN_PROCESSES, ExperimentConfig
from async_grpo_experiments.runner.config_files import write_config
from async_grpo_experiments.runner.graph import Stage, around, graph_of, kind_of
from async_grpo_experiments.runner.peaks import MemoryPeaks, StageForecast
from async_grpo_experiments.runner.results import write_results
from async_grpo_experiments.runner.run import GRACE_S, MEMORY, NAME, CommandOf, ExperimentLog, ExperimentRun
from async_grpo_experiments.runner.states import look, move_aside, refuse_changes
from async_grpo_experiments.slots import gpu_usage
from async_grpo_experiments.slots.foreground import conclude, held_alone
from async_grpo_experiments.slots.ledger import LEDGER, Ledger, end_leftovers, read
from async_grpo_experiments.slots.places import Place, core_pairs, core_places, gpu_places
from async_grpo_experiments.slots.slurm import SlurmStarter, check_cluster, end_jobs
from async_grpo_experiments.slots.starter import LocalStarter, OpenStarter

LOCK, SLURM = "experiment.lock", "slurm"
FORECAST_S = 300.0
STAGES = (sys.executable, "-Pm", "async_grpo_experiments.runner.stages")


def stage_command(root: Path, stage: Stage, token: str) -> list[str]:
    """The command line of a real stage, which can also be run by hand."""
    return [*STAGES, str(root), stage.job.id, stage.kind, token]


def ranks_command(processes: int, root: Path, stage: Stage, token: str) -> list[str]:
    """The command line of a training in several processes. GRPO starts its own: for it, `stage_command`."""
    if stage.kind != "train" or stage.job.algo in OWN_PROCESSES:
        return stage_command(root, stage, token)
    launch = [sys.executable, "-Pm", "accelerate.commands.launch", "--num_processes", str(processes), "--multi_gpu"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    launch += ["--main_process_port", "0"]  # any that is free
    return [*launch, "--no_python", *STAGES, str(root), stage.job.id, stage.kind, token]


def check_stages(config: ExperimentConfig) -> None:
    """Have a child with torch read the keys of the algorithms and the datasets. `UsageError` with what it says."""
    _asked("check", config)


def ask_forecast(config: ExperimentConfig) -> dict[str, StageForecast]:
    """What stages need, by kind, which a child with torch answers. `UsageError` with why it cannot."""
    try:
        answer = _asked("forecast", config, FORECAST_S)
        return shaped(dict[str, StageForecast], json.loads(last_line(answer)), "the forecast")
    except subprocess.TimeoutExpired:
        raise UsageError(f"models and datasets were not read within {FORECAST_S:g} s") from None
    except (BadFileError, ValueError) as error:
        raise UsageError(f"the forecast cannot be read: {error}") from error


def _asked(question: str, config: ExperimentConfig, timeout_s: float | None = None) -> str:
    """What a process with torch prints of the configuration. `UsageError` with what it says where it refuses."""
    text = json.dumps(as_json(config))
    found = subprocess.run([*STAGES, question], input=text, text=True, capture_output=True, timeout=timeout_s)
    if found.returncode:
        raise UsageError(last_line(found.stderr).removeprefix("error: "))
    return found.stdout


def run_experiment(
    root: Path,
    config: ExperimentConfig,
    *,
    places: Sequence[Place] | None = None,
    command: CommandOf | None = None,
    open_starter: OpenStarter | None = None,
    only: str | None = None,
) -> int:
    """Run to the end; returns 0, 1 if a stage failed, 130 if it was asked to stop.

    Args:
        command: makes the command line of a stage; None: that of a real one.
        open_starter: makes what starts stages; None: what `system.engine` says.
        only: a job: it runs, what it needs, and what needs it. None: all.

    Raises:
        AsyncGRPOError: nothing can be started, or the folder is not free.
    """
    starter, gpus = open_starter or _engine(root, config), config.system.gpus_per_job
    command = command or (stage_command if gpus == 1 else partial(ranks_command, gpus))
    held = held_alone(root / LOCK, role="runner", way_out="Wait for it, or stop it.")
    with held, closing(ExperimentLog(root)) as log:
        end_leftovers(read(root / LEDGER).values(), grace_s=GRACE_S, say=log.say)
        graph = graph_of(config)
        if (root / SLURM).exists():  # also where stages are to run here now
            attempts = [
                states.token_of(one) for stage in graph.values() for one in states.partials(root / stage.folder)
            ]
            end_jobs(attempts, log.say)
        wanted = graph if only is None else around(graph, only)
        for stage in graph.values():
            states.adopt(root / stage.folder)
        found = look(root, config)
        refuse_changes(root, found, graph)
        move_aside(root, graph, found, log.say)
        write_config(root, config, graph)
        with closing(Ledger(root / LEDGER)) as ledger:
            places = _places(config) if places is None else places
            memory = MemoryPeaks(root.parent.parent / MEMORY)
            _estimate(memory, config, [graph[name] for name in wanted if name not in found.done], places, log.say)
            run = ExperimentRun(root, config, graph, found, ledger, log, memory, wanted)
            stopped = run.run(places, command, starter)
            records = {name: ledger.records[name] for name in wanted}
            code = conclude(NAME, records, stopped=stopped, go_on=f"experiment resume_from={root}")
        try:
            write_results(root, config)
        except DiskFullError as error:
            log.say(f"the results are not complete: {error}")
        log.say(f"results: {root / 'results.md'}")
    return code


def _estimate(
    memory: MemoryPeaks,
    config: ExperimentConfig,
    todo: Sequence[Stage],
    places: Sequence[Place],
    say: Callable[[str], None],
) -> None:
    """Estimate what stages need whose kind has not run yet, where they can share a GPU.

    Raises:
        UsageError: one needs more than any GPU has.
    """
    largest = _largest(places)
    new = {kind: stage for stage in todo if (kind := kind_of(stage, config)) not in memory}
    if not largest or not new or config.system.gpus_per_job > 1:
        return
    say(f"estimating the memory of {counted(len(new), 'kind')} of stages that have not run here yet")
    try:
        answers = ask_forecast(config)
    except UsageError as error:
        say(f"memory is unknown before a stage of each kind has run alone: {error}")
        return
    memory.estimates = {kind: answers[kind].needed for kind in new}
    found = [taken.total for place in places if (taken := gpu_usage.memory(place.gpus)) is not None]
    for kind, stage in new.items():
        if found and memory.estimates[kind] > max(found):
            raise UsageError(
                f"{stage.name} needs about {size(memory.estimates[kind])}, and the largest GPU has {size(max(found))}. "
                "--dry-run says which batch fits."
            )
        needed = memory.needed(stage, config)
        if needed is not None and needed > largest:
            say(
                f"{stage.name} needs about {size(needed)}, and the largest place has {size(largest)}: "
                "stages like it run alone. --dry-run says which batch fits."
            )


def _places(config: ExperimentConfig) -> list[Place]:
    """The places of this machine: a GPU each, or one share of the cores for each stage at a time. SLURM's: jobs."""
    system = config.system
    most = system.max_parallel_jobs if system.use_parallel_execution else 1
    if system.engine == "slurm":
        return [Place(name=f"slurm{number}") for number in range(1, 1 + (most or len(graph_of(config))))]
    gpus = 0 if system.device == "cpu" else visible_gpus()
    if gpus:
        at_most = None if most is None else min(gpus, most * system.gpus_per_job)
        return [replace(place, bytes=_usable(place)) for place in gpu_places(gpus, each=1, at_most=at_most)]
    return core_places((most or core_pairs()) * system.gpus_per_job)


def largest_memory(config: ExperimentConfig) -> int:
    """Bytes of the largest place of this machine; 0: no place has any."""
    return _largest(_places(config))


def _largest(places: Sequence[Place]) -> int:
    return max((place.bytes or 0 for place in places), default=0)


def _usable(place: Place) -> int | None:
    """Memory of a GPU that stages may share: what a plan counts on, less what others hold now. None: unknown."""
    from async_grpo.checks.plan.memory import USABLE

    found = gpu_usage.memory(place.gpus)
    return None if found is None else max(0, int(USABLE * found.total) - found.used)


def _engine(root: Path, config: ExperimentConfig) -> OpenStarter:
    """What `system.engine` names. `UsageError`: it cannot be had here."""
    if config.system.engine == "local":
        return LocalStarter
    check_cluster()
    return partial(SlurmStarter, root / SLURM, slurm_parameters(config))


def slurm_parameters(config: ExperimentConfig) -> dict[str, Any]:
    """A job of a stage, by the names that submitit has."""
    keys, on_gpu = config.slurm, config.system.device != "cpu"
    found = {
        "slurm_partition": keys.partition,
        "slurm_qos": keys.qos,
        "timeout_min": keys.timeout_min,
        "mem_gb": keys.mem_gb,
        "cpus_per_task": keys.cpus,
        "gpus_per_node": (config.system.gpus_per_job if on_gpu else None) if keys.gpus is None else keys.gpus or None,
    }
    return {name: value for name, value in found.items() if value is not None}
