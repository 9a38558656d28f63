"""The configuration of an experiment as algorithms and problem sets take it, in a process with torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from async_grpo.errors import UsageError
from async_grpo_experiments.algorithms.protocols import configured
from async_grpo_experiments.problems.table import ON_HUB, SCORED, ProblemSet, has_reward, load
from async_grpo_experiments.reward_models import check_tokens
from async_grpo_experiments.runner.config import ALGORITHMS, ExperimentConfig


def settings_of(config: ExperimentConfig, algo: str, family: str, seed: int) -> Any:
    """The settings of an algorithm: its own keys over the shared ones. `UsageError` names a key that is wrong."""
    module, name, shared = ALGORITHMS[algo]
    kind = getattr(import_module(f"async_grpo_experiments.algorithms.{module}"), f"{name}Settings")
    collection, training, system = config.data_collection, config.training, config.system
    model = config.models[family]
    values: dict[str, Any] = {
        "reference": model.ref,
        "temperature": config.generation.temperature,
        "micro_batch_size": training.micro_batch_size,
        "gradient_checkpointing": training.gradient_checkpointing,
        "save_steps": training.save_steps,
        "attn_impl": system.attn_impl,
        "clear_cache_interval": system.clear_cache_interval,
        "max_examples": collection.max_examples,
        "seed": seed if collection.seed is None else collection.seed,
        **{key: getattr(collection, key) for key in shared},
    }
    known = kind.__dataclass_fields__
    values |= {"value": model.value} if "value" in known else {}
    values |= {"max_new_tokens": config.generation.max_new_tokens} if "max_new_tokens" in known else {}
    own = {key: value for key, value in config.algos[algo].items() if key != "enabled"}
    return configured(kind, values | own)


def problems_of(config: ExperimentConfig, dataset: str, *, evaluated: bool = False) -> ProblemSet:
    """The rows of a dataset, to train on or to evaluate on. `UsageError`: there are none."""
    keys = config.datasets[dataset]
    split = keys.eval_split if evaluated else keys.split
    most = config.evaluation.max_examples if evaluated else config.data_collection.max_examples
    made = keys.made | (keys.evaluated if evaluated else {})
    chat = config.generation.use_chat_template
    problems = load(keys.source or dataset, path=keys.path, split=split, max_examples=most, chat=chat, **made)
    return problems if keys.reward_model is None else ProblemSet(problems.rows, None, verified=False)


def check(config: ExperimentConfig) -> None:
    """Refuse keys that an algorithm or a dataset does not know. `UsageError` says which."""
    for algo in config.enabled:
        for family in config.families:
            settings_of(config, algo, family, seed=0)
    names = {one for dataset in config.training.datasets for one in (dataset, *config.evaluated_sets(dataset))}
    for dataset in sorted(names):
        keys = config.datasets[dataset]
        source = keys.source or dataset
        if keys.reward_model is not None:
            _check_reward_model(config, dataset, keys.reward_model)
        elif not has_reward(source):
            raise UsageError(f"{dataset} is scored by a reward model: set datasets.{dataset}.reward_model=FOLDER.")
        graded = keys.reward_model is not None
        if keys.path is not None or source not in ON_HUB:  # those of the hub are read when they are used
            graded = not problems_of(config, dataset).verified
            problems_of(config, dataset, evaluated=True)
        if graded and dataset in config.training.datasets and "QSharp" in config.enabled:
            _check_graded(config, dataset)


def _check_graded(config: ExperimentConfig, dataset: str) -> None:
    """`UsageError` where Q# would learn graded rewards as if they were 0 or 1; PITA's labels are of its pairs."""
    if settings_of(config, "QSharp", config.families[0], seed=0).guidance.mode == "bernoulli":
        raise UsageError(
            f"QSharp with guidance.mode=bernoulli is for rewards that are 0 or 1, and those of {dataset} are graded: "
            "set algos.QSharp.loss_type=mle and algos.QSharp.guidance.mode=histogram."
        )


def _check_reward_model(config: ExperimentConfig, dataset: str, name: str) -> None:
    """`UsageError` where the set needs no such model, or the model reads other tokens than a reference writes."""
    source = config.datasets[dataset].source or dataset
    if source not in SCORED:
        raise UsageError(
            f"datasets.{dataset}.reward_model: answers to {source} are right or wrong, without a model. Leave it out; "
            f"models score {' and '.join(SCORED)}."
        )
    for family in config.families:
        check_tokens(name, config.models[family].ref)
