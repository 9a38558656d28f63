"""`async-grpo experiment`: algorithms × models × datasets × rounds, from one command to a table."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from async_grpo.cli import options
from async_grpo.cli.parser import Parser
from async_grpo.errors import UsageError
from async_grpo.formatting import counted, for_people, printable, size

if TYPE_CHECKING:
    from async_grpo_experiments.runner.config import ExperimentConfig
    from async_grpo_experiments.runner.peaks import StageForecast

EXAMPLES = """\
  async-grpo experiment experiment.name=star gpu=cpu training.datasets=[star] rounds_of_training=2
  async-grpo experiment experiment.name=star --dry-run         jobs, graph, memory, hours; starts nothing
  async-grpo experiment resume_from=outputs/star/2026-11-24_01-30-00
  async-grpo experiment --status outputs/star/2026-11-24_01-30-00
  async-grpo experiment --retry PITA_llama_GSM8K_r1 outputs/star/2026-11-24_01-30-00
  async-grpo experiment --init                                 write ./conf, to be changed

keys are those of conf/config.yaml: of the folder conf/ here, else of the package
exit codes: 0 all jobs finished; 1 at least one failed; 2 nothing could be started; 130 stopped by Ctrl-C"""
RESUME = "resume_from="


def build_parser() -> Parser:
    parser = options.parser(
        "experiment", "Run a matrix of algorithms, models, datasets and rounds, and sum it up.", EXAMPLES
    )
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the configuration, or with --retry DIR")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument(
        "--dry-run", action="store_true", help="show jobs, graph, memory, disk and hours; start nothing"
    )
    instead.add_argument("--status", type=Path, metavar="DIR", help="verify and show the jobs of an experiment")
    instead.add_argument("--retry", metavar="JOB", help="run this job of an experiment, and what it blocks")
    instead.add_argument("--init", action="store_true", help="write the package's configuration to ./conf")
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), metavar="DIR", help="default: outputs/")
    return parser


def run(args: argparse.Namespace) -> int:
    from async_grpo_experiments.runner import experiment
    from async_grpo_experiments.runner.config import checked
    from async_grpo_experiments.runner.config_files import changed, composed, config_of, folder_of_conf, write_conf

    if "TORCHELASTIC_RUN_ID" in os.environ or "LOCAL_RANK" in os.environ:
        raise UsageError("torchrun started this: the runner starts the processes. Start it without torchrun.")
    keys = [key for key in args.keys or [] if not key.startswith(RESUME)]
    begun = [Path(key.removeprefix(RESUME)) for key in args.keys or [] if key.startswith(RESUME)]
    _refuse_unread(args, begun)
    if args.init:
        write_conf(Path("conf"))
        print("conf/config.yaml and conf/gpu/ are written")
        return 0
    if args.status is not None:
        return _show(args.status)
    if args.retry is not None:
        if len(keys) != 1:
            raise UsageError("--retry JOB DIR: name the folder of the experiment, and nothing else.")
        root = Path(keys[0])
        return experiment.run_experiment(root, config_of(root), only=args.retry)
    if begun:
        root = begun[0]
        config = changed(root, keys)
    else:
        config = checked(composed(folder_of_conf(), keys))
        root = args.outputs / config.experiment.name / time.strftime("%Y-%m-%d_%H-%M-%S")
    if args.dry_run:
        return _plan(config, root.parent.parent)
    if keys or not begun:
        experiment.check_stages(config)
    return experiment.run_experiment(root, config)


def _refuse_unread(args: argparse.Namespace, begun: Sequence[Path]) -> None:
    """`UsageError` where something was given that would not be read."""
    if args.keys and (args.init or args.status is not None):
        raise UsageError(f"{' '.join(args.keys)}: --init and --status take no keys. Leave them out.")
    if begun and (args.retry is not None or len(begun) > 1):
        raise UsageError("One experiment is continued: give resume_from=DIR once, or --retry JOB DIR.")
    if begun and "outputs" in args.given:
        raise UsageError("--outputs: a resumed experiment stays in its folder. Leave it out.")


def _show(root: Path) -> int:
    from async_grpo.rundir.locks import KernelLock
    from async_grpo_experiments.runner import experiment, states
    from async_grpo_experiments.runner.config_files import config_of
    from async_grpo_experiments.runner.graph import graph_of, stages_by_job
    from async_grpo_experiments.slots import ledger

    config = config_of(root)
    found, records = states.look(root, config), ledger.read(root / ledger.LEDGER)
    is_run = KernelLock(root / experiment.LOCK).is_held()  # the ledger of a killed runner says what ran then
    rows = []
    for job, stages in stages_by_job(graph_of(config)).items():
        state = states.state_of(stages, found.done, records)
        known = [(stage, records[stage.name]) for stage in stages if stage.name in records]
        running = [stage.kind for stage, record in known if record.state == ledger.RUNNING and is_run]
        why = [found.redo[stage.name] for stage in stages if stage.name in found.redo]
        why += [record.why for _, record in known if record.state == ledger.FAILED]
        rows.append([job.id, state, ", ".join(running), printable("; ".join(why))])
    options.print_table(str(root), ["job", "state", "running", "why"], rows)
    return 0


def _plan(config: ExperimentConfig, outputs: Path) -> int:
    """Show the graph at once, and then what its stages need: a child that imports torch answers that."""
    from async_grpo_experiments.runner.graph import graph_of, jobs_of

    graph = graph_of(config)
    print(f"{counted(len(jobs_of(config)), 'job')}, {counted(len(graph), 'stage')}")
    for name, stage in graph.items():
        needs = f" needs {', '.join(stage.needs)}" if stage.needs else ""
        print(printable(f"  {name}{needs}"), flush=True)
    _forecast(config, outputs)
    return 0


def _forecast(config: ExperimentConfig, outputs: Path) -> None:
    """Memory, disk and time by kind of stage, measured where an experiment of this outputs folder had such stages."""
    from async_grpo_experiments.runner import experiment
    from async_grpo_experiments.runner.graph import Stage, graph_of, kind_of
    from async_grpo_experiments.runner.peaks import MARGIN, MemoryPeaks, StageSeconds, batch_of
    from async_grpo_experiments.runner.run import MEMORY, SECONDS

    try:
        answers = experiment.ask_forecast(config)
    except UsageError as error:
        print(printable(f"memory and disk are unknown: {error}"))
        answers = {}
    peaks, seconds = MemoryPeaks(outputs / MEMORY), StageSeconds(outputs / SECONDS).by_kind
    by_kind: dict[str, list[Stage]] = {}
    for stage in graph_of(config).values():
        by_kind.setdefault(kind_of(stage, config), []).append(stage)
    largest = experiment.largest_memory(config)
    rows, disk, too_large = [], 0, list[str]()
    for kind, stages in by_kind.items():
        job, measured, answer = stages[0].job, peaks.needed(stages[0], config), answers.get(kind)
        estimated = "unknown" if answer is None else f"~{size(answer.needed)}"
        memory = estimated if measured is None else size(measured)
        disk += 0 if answer is None else answer.disk * len(stages)
        took = for_people(seconds[kind]) if kind in seconds else "unknown"
        name = f"{job.algo or 'reference'} {stages[0].kind}, {job.family}"
        rows.append([name, str(len(stages)), memory, "unknown" if answer is None else size(answer.disk), took])
        if answer is not None and (needed := measured or int(answer.needed * MARGIN)) > largest > 0:
            too_large.append(_too_large(name, batch_of(stages[0], config).name, needed, largest, answer))
    options.print_table("each stage", ["kind", "stages", "memory", "disk", "time"], rows)
    for sentence in too_large:
        print(printable(sentence))
    known = sum(seconds[kind] * len(stages) for kind, stages in by_kind.items() if kind in seconds)
    rest = sum(len(stages) for kind, stages in by_kind.items() if kind not in seconds)
    unknown = f"; {counted(rest, 'stage')} of kinds that have not run in {outputs} yet" if rest else ""
    took = f"{for_people(known)} one after another" if known else "time unknown"
    print(printable(f"all stages: {size(disk) if answers else 'unknown'} on disk, {took}{unknown}"))
    print("~: by the rules of `train --dry-run`; other memory was measured, and has a tenth added")


def _too_large(name: str, key: str, needed: int, largest: int, answer: StageForecast) -> str:
    """Say that a stage needs more than a GPU has, and the largest batch that would fit."""
    fits = answer.fitting(largest, needed)
    way_out = "no batch fits: take a smaller model, or a larger GPU" if fits is None else f"set {key}={fits.rows}"
    then = "" if fits is None else f", which needs {size(fits.nbytes)}"
    return f"{name} needs {size(needed)}, and the largest place has {size(largest)}: {way_out}{then}."
