"""The configuration of an experiment: composed by Hydra, written to its folder, read there again, and changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from async_grpo.errors import BadFileError, UsageError
from async_grpo.rundir.files import write_lines
from async_grpo.rundir.reading import MAX_NESTING, naming, read_file
from async_grpo.rundir.shape import as_json
from async_grpo_experiments.runner.config import ExperimentConfig, checked
from async_grpo_experiments.runner.graph import Stage

CONFIG = "config.yaml"
PACKAGED = Path(__file__).parents[1] / "conf"
_MOST_BYTES = 1 << 20


def composed(folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """The tree that `folder/config.yaml` and the overrides make.

    Raises:
        UsageError: Hydra is not installed, or refuses an override.
    """
    try:
        from hydra import compose, initialize_config_dir
        from hydra.errors import HydraException
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError as error:
        raise UsageError(
            f"Experiments are configured by Hydra, and it cannot be imported ({error}): "
            "pip install 'async-grpo[experiments]'."
        ) from error
    try:
        with initialize_config_dir(str(folder.absolute()), version_base=None):
            tree = OmegaConf.to_container(compose("config", list(overrides)), resolve=True)
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        raise UsageError(
            f"Hydra cannot compose {folder / CONFIG} with {' '.join(overrides) or 'no keys'}: {error}"
        ) from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def folder_of_conf() -> Path:
    """`./conf` where it has a configuration, else that of the package."""
    own = Path("conf")
    return own if (own / CONFIG).is_file() else PACKAGED


def write_conf(folder: Path) -> None:
    """Copy the package's configuration, to be changed. `UsageError`: there is one."""
    if folder.exists():
        raise UsageError(f"{folder} exists. Change the files there, or move it away.")
    shutil.copytree(PACKAGED, folder)


def write_config(root: Path, config: ExperimentConfig, graph: Mapping[str, Stage]) -> None:
    """Write the whole configuration, and that of each job."""
    tree = as_json(config)
    _write_yaml(root / CONFIG, tree)
    for job in {stage.job for stage in graph.values()}:
        folder = root / "jobs" / job.id
        folder.mkdir(parents=True, exist_ok=True)
        own = {**tree, "algos": {job.algo: tree["algos"].get(job.algo, {})}}
        _write_yaml(folder / CONFIG, {"job": asdict(job), **own})


def _write_yaml(path: Path, tree: Mapping[str, Any]) -> None:
    write_lines(path, yaml.safe_dump(dict(tree), sort_keys=False).splitlines())


def config_of(root: Path) -> ExperimentConfig:
    """The configuration that an experiment was last started with.

    Raises:
        UsageError: there is no experiment, or its configuration is none.
        BadFileError: the file cannot be read.
    """
    path = root / CONFIG
    try:
        data = read_file(path, _MOST_BYTES)
        with naming(path):
            tree = _parsed(bytes(data))
        return checked(tree)
    except FileNotFoundError:
        raise UsageError(f"{root} holds no experiment: it has no {CONFIG}.") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _parsed(text: bytes) -> Any:
    """The value in a text of YAML, which JSON could hold. `BadFileError` gives the reason where there is none."""
    levels = 0
    try:
        for event in yaml.parse(text):
            if isinstance(event, yaml.AliasEvent):
                raise BadFileError("it has an alias, which may stand for more than memory holds")
            levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if levels > MAX_NESTING:
                raise BadFileError("its YAML is nested too deeply")
        return json.loads(json.dumps(yaml.safe_load(text), default=str))
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise BadFileError(f"it is not valid YAML ({' '.join(str(error).split())})") from error


def changed(root: Path, overrides: Sequence[str]) -> ExperimentConfig:
    """The configuration of an experiment with some keys changed, as at its start: `a.b=c`, or `+a.b=c` for new ones."""
    begun = config_of(root)
    return checked(composed(root, overrides)) if overrides else begun
