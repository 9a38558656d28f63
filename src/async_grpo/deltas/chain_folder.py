"""Where a chain is: in a folder, or named by a run directory; and `RUN_DIR@137`, one version of it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from async_grpo.deltas.chain import CHAIN_FILE, Chain
from async_grpo.errors import AsyncGRPOError, DeltaChainError
from async_grpo.rundir.paths import RunDir

_AT = re.compile(r"(.+)@(\d+)")


class NamedVersion(NamedTuple):
    """What `RUN_DIR@VERSION` says."""

    folder: Path  # of the chain
    version: int


def chain_folder(path: Path) -> Path:
    """The chain in `path`, or of the run in it. `DeltaChainError` where there is none."""
    if (path / CHAIN_FILE).exists():
        return path
    state = RunDir(path).read_state() if path.is_dir() else None
    if state is None:
        raise DeltaChainError(f"{path} is neither a chain of deltas nor a run directory.")
    if not state.delta_dir:
        raise DeltaChainError(
            f"The run in {path} kept no versions. `train --delta-every 1` keeps them; its checkpoints are in "
            f"{state.output_dir or 'output_dir of the setup file'}."
        )
    folder = Path(state.delta_dir)
    if not (folder / CHAIN_FILE).exists():
        raise DeltaChainError(f"The run in {path} kept its versions in {folder}, where no chain is: was it moved?")
    return folder


def named_version(text: str) -> NamedVersion | None:
    """`worker@137` -> the chain and 137; None where `text` names no version. `DeltaChainError` as `chain_folder`."""
    match = _AT.fullmatch(text)
    if match is None or Path(text).exists() or not Path(match[1]).expanduser().is_dir():
        return None
    return NamedVersion(chain_folder(Path(match[1]).expanduser()).absolute(), int(match[2]))


def kept_of(run_dir: Path, versions: Iterable[int]) -> str:
    """How to load the policy versions that sampled some groups; empty where the run has not kept them."""
    try:
        kept = {*Chain(chain_folder(run_dir)).versions} & {*versions}
    except (AsyncGRPOError, OSError):
        return ""
    if not kept:
        return ""
    which = f"version {max(kept)}," if len(kept) == 1 else f"{len(kept)} versions, {min(kept)} to {max(kept)},"
    verb = "is" if len(kept) == 1 else "are"
    newest = shlex.quote(f"{run_dir}@{max(kept)}")
    return f"sampled by {which} which {verb} kept: async-grpo evaluate {newest} --config SETUP_FILE"


def require_version(named: NamedVersion) -> None:
    """`DeltaChainError` where the version is not there, or the files that lead to it are not."""
    Chain(named.folder).path_to(named.version)
