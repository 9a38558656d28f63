"""Composes a configuration with Hydra: the files of `conf/`, and `key=value` from the command line."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_grpo.errors import UsageError

CONFIG = "config.yaml"
PACKAGED = Path(__file__).parents[1] / "conf"


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
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(
            f"Hydra cannot compose {folder / CONFIG} with {' '.join(overrides) or 'no keys'}: {error}"
        ) from error
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def place_of_conf() -> Path:
    """`./conf` where it has a configuration, else that of the package."""
    own = Path("conf")
    return own if (own / CONFIG).is_file() else PACKAGED


def write_conf(folder: Path) -> None:
    """Copy the package's configuration, to be changed. `UsageError`: there is one."""
    if folder.exists():
        raise UsageError(f"{folder} exists. Change the files there, or move it away.")
    shutil.copytree(PACKAGED, folder)
