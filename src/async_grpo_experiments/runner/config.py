"""What an experiment's configuration may say: keys, types and ranges, read without torch.

The keys are those of the original. The keys of an algorithm are read by the algorithm's own settings, in a process of
its own (`stages check`), before anything starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.shape import shaped

# Module, class, and the keys of `data_collection` that the algorithm has besides `max_examples`.
ALGORITHMS = {
    "QSharp": ("qsharp", "QSharp", ("samples_per_example",)),
    "QSharp-HF": ("qsharp_hf", "QSharpHF", ("samples_per_example", "bradley_terry_beta")),
    "PITA": ("pita", "PITA", ("samples_per_example", "bradley_terry_beta")),
    "DPO": ("dpo", "DPO", ("samples_per_example", "bradley_terry_beta")),
    "GRPO": ("grpo", "GRPO", ()),
    "GRPO-HF": ("grpo", "GRPOHF", ("bradley_terry_beta",)),
}
GUIDED = ("QSharp", "QSharp-HF", "PITA")  # they train a head, and leave the reference alone
OWN_PROCESSES = ("GRPO", "GRPO-HF")  # their training starts a server and workers, on all GPUs of the place
DEFAULT_BATCH = 24
_AT_LEAST_1 = (
    *("rounds_of_training", "num_samples", "training.micro_batch_size", "generation.batch_size"),
    *("generation.max_new_tokens", "evaluation.num_samples", "data_collection.reward_batch_size"),
    *("system.gpus_per_job", "system.max_parallel_jobs", "slurm.timeout_min", "slurm.mem_gb", "slurm.cpus"),
)
_OVER_0 = ("scheduling.deadline_s", "scheduling.silence_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameAndSeed:
    """Which experiment it is; repetition i of a line has the seed `seed` + i."""

    name: str
    seed: int = 42


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A reference, and the model whose backbone its heads begin from; None: the reference."""

    ref: str
    value: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemKeys:
    """How stages run.

    Attributes:
        deterministic: sample each group alone, since what shares a batch changes the bits: slower, and the same results
            bit for bit, however often it was killed.
    """

    attn_impl: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    clear_cache_interval: int = 10
    use_parallel_execution: bool = True
    gpus_per_job: int = 1
    engine: Literal["local", "slurm"] = "local"
    device: Literal["auto", "cpu"] = "auto"
    deterministic: bool = False
    max_parallel_jobs: int | None = None  # stages at a time; None: all that fit


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmKeys:
    """What each stage's job asks for; None: the cluster's default."""

    partition: str | None = None
    qos: str | None = None
    timeout_min: int = 240  # its time limit. Before it the stage is ended, and queued again to continue.
    mem_gb: int | None = None
    cpus: int | None = None
    gpus: int | None = None  # None: `system.gpus_per_job`, or none where `system.device` is cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingKeys:
    """The datasets to train on, and what all trainings share."""

    datasets: list[str]
    micro_batch_size: int = 4
    gradient_checkpointing: bool = True
    save_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationKeys:
    """How completions are sampled; `batch_size` is of a worker."""

    batch_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    use_chat_template: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionKeys:
    """What is sampled of a dataset; without `seed`, with that of the line."""

    samples_per_example: int = 4
    reward_batch_size: int = 32
    bradley_terry_beta: float = 1.0
    max_examples: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationKeys:
    """What is evaluated.

    Attributes:
        datasets_by_train: evaluation sets of a training set; default: itself.
    """

    etas: list[float] = field(default_factory=list)  # strengths to decode with where there is a head; none: its own
    num_samples: int = 8
    max_examples: int | None = None
    datasets_by_train: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetKeys:
    """A set of `problems.table`, by its own name or by that of `source`.

    Attributes:
        reward_model: that scores answers where no function does, or of `sentiment` in place of its lexicon.
        evaluated: keys of the same set where it is evaluated, such as `seed`.
    """

    source: str | None = None
    path: str | None = None
    reward_model: str | None = None
    split: str = "train"
    eval_split: str = "test"
    made: dict[str, Any] = field(default_factory=dict)  # keys of a set that is made here, such as `branches`
    evaluated: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingKeys:
    """Which stage goes first, and how long one may take."""

    priority: str | None = None  # `package.module:function` in place of `priority.estimate_job_priority`
    deadline_s: float | None = None  # a stage that takes longer is killed and has failed
    silence_s: float | None = 1800.0  # so has a stage whose log has said nothing for so long; None: however long
    stagger_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentConfig:
    experiment: NameAndSeed
    models: dict[str, ModelFamily]
    training: TrainingKeys
    algos: dict[str, dict[str, Any]]
    datasets: dict[str, DatasetKeys] = field(default_factory=dict)
    model_pairs: list[str] = field(default_factory=list)  # names in `models`; empty: all of them
    rounds_of_training: int = 2
    num_samples: int = 1  # repetitions of each line, with the seeds seed, seed + 1, …
    system: SystemKeys = field(default_factory=SystemKeys)
    slurm: SlurmKeys = field(default_factory=SlurmKeys)
    generation: GenerationKeys = field(default_factory=GenerationKeys)
    data_collection: CollectionKeys = field(default_factory=CollectionKeys)
    evaluation: EvaluationKeys = field(default_factory=EvaluationKeys)
    scheduling: SchedulingKeys = field(default_factory=SchedulingKeys)

    @property
    def families(self) -> list[str]:
        return self.model_pairs or [*self.models]

    @property
    def enabled(self) -> list[str]:
        """The algorithms that take part."""
        return [name for name, keys in self.algos.items() if keys.get("enabled", True)]

    def evaluated_sets(self, dataset: str) -> list[str]:
        return self.evaluation.datasets_by_train.get(dataset, [dataset])


def checked(tree: object) -> ExperimentConfig:
    """The configuration that a composed tree gives. `UsageError` names the first key that is wrong."""
    match tree:
        case {"experiment": None | {"name": None | ""}}:
            raise UsageError("experiment.name must be set, e.g. experiment.name=star.")
    try:
        config = shaped(ExperimentConfig, tree, "it")
    except BadFileError as error:
        raise UsageError(f"The configuration cannot be used: {error}.") from error
    for problem in _problems(config):
        raise UsageError(problem)
    return config


def _problems(config: ExperimentConfig) -> Iterator[str]:
    yield from _out_of_range(config)
    yield from _unknown_names(config)
    if config.system.attn_impl == "flash_attention_2" and find_spec("flash_attn") is None:
        yield "flash_attention_2 needs the package flash-attn, which is not here: set system.attn_impl=eager."
    yield from _of_slurm(config)
    for algo in config.enabled:
        yield from _problems_of(algo, config)


def _out_of_range(config: ExperimentConfig) -> Iterator[str]:
    for name, value in _set(config, _AT_LEAST_1):
        if value < 1:
            yield f"{name} must be at least 1, got {value}."
    for name, value in _set(config, _OVER_0):
        if not value > 0:
            yield f"{name} must be over 0, got {value:g}."
    if not config.scheduling.stagger_s >= 0:
        yield f"scheduling.stagger_s must be 0 or more, got {config.scheduling.stagger_s:g}."
    yield from (f"evaluation.etas must be over 0, got {eta:g}." for eta in config.evaluation.etas if not eta > 0)


def _set(config: ExperimentConfig, names: Collection[str]) -> list[tuple[str, Any]]:
    """Return the keys that are not null, with their values."""
    return [(name, value) for name in names if (value := attrgetter(name)(config)) is not None]


def _unknown_names(config: ExperimentConfig) -> Iterator[str]:
    name, datasets = config.experiment.name, config.training.datasets
    if "/" in name or name.startswith("."):
        yield f"experiment.name {name!r} is the name of a folder: leave out '/' and a leading '.'."
    if not (config.enabled and config.families and datasets):
        yield "The matrix has 0 jobs: enable an algorithm, and name a model and a dataset of training.datasets."
    by_train = config.evaluation.datasets_by_train
    for kind, names, known in (
        ("algos", config.enabled, ALGORITHMS),
        ("model_pairs", config.families, config.models),
        ("datasets", [*datasets, *chain.from_iterable(by_train.values()), *by_train], config.datasets),
    ):
        yield from (f"{kind} has no {one!r}.{_nearest(one, known)}" for one in names if one not in known)


def _of_slurm(config: ExperimentConfig) -> Iterator[str]:
    if config.system.engine != "slurm":
        return
    gpus, each = config.slurm.gpus, config.system.gpus_per_job
    if gpus not in (None, 0, each):
        yield f"slurm.gpus {gpus} is not what a stage uses: leave it out, and set system.gpus_per_job, now {each}."
    if config.scheduling.deadline_s is not None:
        yield "scheduling.deadline_s would count a job's wait in SLURM's queue: set slurm.timeout_min."


def _problems_of(algo: str, config: ExperimentConfig) -> Iterator[str]:
    keys, gpus = config.algos[algo], config.system.gpus_per_job
    each = config.training.micro_batch_size * gpus
    batch = keys.get("batch_size", DEFAULT_BATCH)
    if type(batch) is not int or batch < 1:
        yield f"algos.{algo}.batch_size is {batch!r}, not a whole number over 0."
    elif batch % each:
        near = [str(size) for size in (batch // each * each, -(-batch // each) * each) if size]
        on = f" times {gpus} GPUs" if gpus > 1 else ""
        yield (
            f"algos.{algo}.batch_size {batch} must be a multiple of training.micro_batch_size{on}, {each}: set it to "
            f"{' or '.join(near)}."
        )
    if type(keys.get("enabled", True)) is not bool:
        yield f"algos.{algo}.enabled is {keys['enabled']!r}, not true or false."


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=1)
    return f" The nearest is {near[0]}." if near else f" There are {', '.join(known)}."
