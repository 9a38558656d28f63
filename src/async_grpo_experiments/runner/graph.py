"""Jobs and their stages: which there are, which needs which, and which starts first.

A line is an algorithm on a family and a dataset, with one seed. Round n of a line is a job; its generation needs the
training of round n − 1 of the same line. The reference of a family on a dataset is also a job, and only evaluates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any, Literal, TypeAlias

from async_grpo.errors import UsageError
from async_grpo_experiments.runner.config import GUIDED, ExperimentConfig

StageKind: TypeAlias = Literal["generate", "train", "evaluate"]
FOLDERS: Mapping[str, str] = {"generate": "data", "train": "model", "evaluate": "evaluation"}
OF_PLANS = ("samples_per_example", "samples_per_prompt", "max_examples", "temperature", "guidance", "seed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentJob:
    """One round of a line, or a reference."""

    algo: str  # empty: the reference
    family: str
    dataset: str
    round: int
    seed: int
    sample: int | None = None  # of `num_samples`; None: there is one

    @property
    def id(self) -> str:
        return self.at(self.round)

    def at(self, round_number: int) -> str:
        """The name of the same line's job in another round."""
        name = f"{self.algo or 'reference'}_{self.family}_{self.dataset}"
        name += f"_r{round_number}" if self.algo else ""
        return name + ("" if self.sample is None else f"_s{self.sample}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One process: a command line, a place, a folder that it leaves."""

    job: ExperimentJob
    kind: StageKind
    needs: tuple[str, ...] = ()  # names of stages

    @property
    def name(self) -> str:
        return f"{self.job.id}.{self.kind}"

    @property
    def folder(self) -> str:
        """In the experiment's folder."""
        return f"jobs/{self.job.id}/{FOLDERS[self.kind]}"


def jobs_of(config: ExperimentConfig) -> list[ExperimentJob]:
    """Every job of the matrix, references first."""
    seed, many = config.experiment.seed, config.num_samples > 1
    pairs = [(family, dataset) for dataset in config.training.datasets for family in config.families]
    found = [ExperimentJob(algo="", family=family, dataset=dataset, round=0, seed=seed) for family, dataset in pairs]
    found += [
        ExperimentJob(algo=algo, family=family, dataset=dataset, round=n, seed=seed + i, sample=i if many else None)
        for family, dataset in pairs
        for algo in config.enabled
        for i in range(config.num_samples)
        for n in range(1, config.rounds_of_training + 1)
    ]
    return found


def stages_of(job: ExperimentJob) -> list[Stage]:
    """The stages of a job, in their order."""
    if not job.algo:
        return [Stage(job=job, kind="evaluate")]
    before = (f"{job.at(job.round - 1)}.train",) if job.round > 1 else ()
    data = tuple(f"{job.at(number)}.generate" for number in range(1, job.round + 1))  # it trains on all rounds so far
    return [
        Stage(job=job, kind="generate", needs=before),
        Stage(job=job, kind="train", needs=(*before, *data)),
        Stage(job=job, kind="evaluate", needs=(f"{job.id}.train",)),
    ]


def graph_of(config: ExperimentConfig) -> dict[str, Stage]:
    """Every stage by name; what a stage needs comes before it."""
    return {stage.name: stage for job in jobs_of(config) for stage in stages_of(job)}


def stages_by_job(graph: Mapping[str, Stage]) -> dict[ExperimentJob, list[Stage]]:
    found: dict[ExperimentJob, list[Stage]] = {}
    for stage in graph.values():
        found.setdefault(stage.job, []).append(stage)
    return found


def below(graph: Mapping[str, Stage], names: Collection[str]) -> set[str]:
    """These stages and all that need them, directly or not."""
    found = {*names}
    for name, stage in graph.items():  # each is behind what it needs
        if found.intersection(stage.needs):
            found.add(name)
    return found


def around(graph: Mapping[str, Stage], job: str) -> dict[str, Stage]:
    """The stages of a job, what they need, and what needs them. `UsageError`: there is no such job."""
    jobs = {stage.job.id for stage in graph.values()}
    if job not in jobs:
        raise UsageError(f"There is no job {job}. The jobs are {', '.join(sorted(jobs))}.")
    names = below(graph, [name for name, stage in graph.items() if stage.job.id == job])
    for name, stage in reversed([*graph.items()]):
        if name in names:
            names.update(stage.needs)
    return {name: stage for name, stage in graph.items() if name in names}


def kind_of(stage: Stage, config: ExperimentConfig) -> str:
    """What stages of the same needs have in common: algorithm, stage, models, batch and longest completion."""
    keys, family = config.algos.get(stage.job.algo, {}), config.models[stage.job.family]
    models = family.ref if family.value is None else f"{family.ref}+{family.value}"
    batch = f"{keys.get('batch_size')}/{config.training.micro_batch_size}/{config.generation.batch_size}"
    checkpointed = " checkpointed" if config.training.gradient_checkpointing else ""
    tokens = f"{config.generation.max_new_tokens} tokens{checkpointed}"
    return f"{stage.job.algo or 'reference'} {stage.kind} {models} {batch} {tokens}"


def keys_of(config: ExperimentConfig, stage: Stage) -> dict[str, Any]:
    """The part of the configuration that makes what this stage leaves, flat: `algos.PITA.lr`, ….

    A finished stage whose part has changed is refused; keys that are in no finished stage's part may change.
    """
    job, tree = stage.job, asdict(config)
    family, algo = tree["models"][job.family], tree["algos"].get(job.algo, {})
    part: dict[str, Any] = {"seed": job.seed, "models": {job.family: family}, "generation": tree["generation"]}
    collection = tree["data_collection"]
    if stage.kind == "generate":
        own = {name: value for name, value in algo.items() if name in OF_PLANS}
        part |= {"algos": {job.algo: own}, "data_collection": collection}
    if stage.kind == "train":
        own = {name: value for name, value in algo.items() if name != "enabled"}
        training = {name: tree["training"][name] for name in ("micro_batch_size", "gradient_checkpointing")}
        part |= {"algos": {job.algo: own}, "training": training, "data_collection": collection}
        part |= {"system": {"gpus_per_job": config.system.gpus_per_job, "attn_impl": config.system.attn_impl}}
    if stage.kind == "evaluate":
        part["algos"] = {job.algo: {"guidance": algo.get("guidance")}} if job.algo in GUIDED else {}
        part["evaluation"] = tree["evaluation"]
        part["datasets"] = {name: tree["datasets"].get(name) for name in config.evaluated_sets(job.dataset)}
    else:
        part["datasets"] = {job.dataset: tree["datasets"].get(job.dataset)}
    return dict(_flat(part))


def _flat(tree: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        found += _flat(value, f"{before}{name}.") if isinstance(value, dict) else [(f"{before}{name}", value)]
    return found


def estimate_job_priority(job: ExperimentJob, cfg: ExperimentConfig) -> int:
    """Stages that are left of the job's line from this round on; higher ones start first."""
    return 1 if not job.algo else 2 * (cfg.rounds_of_training - job.round) + 3


def chains_left(graph: Mapping[str, Stage], seconds: Mapping[tuple[str, str], float]) -> dict[str, float]:
    """The longest chain from each stage on, by its name.

    Args:
        seconds: means of earlier stages, by algorithm and kind; without any, stages count 1 each.
    """
    known = sum(seconds.values()) / len(seconds) if seconds else 1.0
    behind = dict.fromkeys(graph, 0.0)  # what needs a stage comes after it
    found: dict[str, float] = {}
    for stage in reversed([*graph.values()]):
        found[stage.name] = seconds.get((stage.job.algo, stage.kind), known) + behind[stage.name]
        for need in stage.needs:
            behind[need] = max(behind[need], found[stage.name])
    return found


def named(name: str) -> Callable[[ExperimentJob, ExperimentConfig], int]:
    """The function `package.module:function` of `scheduling.priority`. `UsageError` if there is none."""
    module, _, function = name.partition(":")
    try:
        found: Callable[[ExperimentJob, ExperimentConfig], int] = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"scheduling.priority {name!r} cannot be loaded: {error}. Give package.module:function."
        ) from error
    return found
