"""A version as a folder that transformers or PEFT loads: the weights, and what the run kept of configuration."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from async_grpo.deltas.chain import MODEL, Chain
from async_grpo.deltas.tensors import as_tensors
from async_grpo.errors import DeltaChainError
from async_grpo.rundir.files import space_for
from async_grpo.rundir.reading import read_file, read_object

WEIGHTS = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
MAX_FILE_BYTES = 1 << 30  # of a tokenizer or a configuration


def write_checkpoint(chain: Chain, version: int, folder: Path) -> Path:
    """Rebuild `version` into a new folder; returns the file of weights.

    Raises:
        DeltaChainError: the folder exists, or the version cannot be rebuilt.
    """
    if folder.exists():
        raise DeltaChainError(f"{folder} exists already. Name a folder that does not.")
    tensors = as_tensors(chain.rebuild(version), chain.about.tensors)
    name = WEIGHTS.get(chain.about.kind, WEIGHTS["model"])
    building = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        with space_for(folder):
            building.mkdir(parents=True)
            if (chain.folder / MODEL).is_dir():
                _copy_files(chain.folder / MODEL, building)
            _set_dtype(building / "config.json", tensors)
            named = {chain.about.names.get(key, key): tensor for key, tensor in tensors.items()}
            try:
                save_file(named, building / name, metadata={"format": "pt"})
            except SafetensorError as error:  # the disk may be full
                raise DeltaChainError(f"{folder / name} cannot be written: {error}") from error
            building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return folder / name


def _copy_files(source: Path, target: Path) -> None:
    """Copy what is below `source`. `BadFileError` names what is no plain file: a link may lead to a secret."""
    for path in sorted(source.rglob("*")):
        copy = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            copy.mkdir()
        else:
            copy.write_bytes(read_file(path, MAX_FILE_BYTES))


def keep_surroundings(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write what a checkpoint of `model` needs besides weights."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if hasattr(model, "peft_config"):
        model.peft_config["default"].save_pretrained(str(folder))
    else:
        model.config.save_pretrained(str(folder))
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.save_pretrained(str(folder))
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


def names_in_adapter(model: Any) -> dict[str, str]:
    """The name in a saved adapter of each parameter that has another one in the model."""
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0, dtype=torch.uint8, device="cpu") for name in model.state_dict()}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    saved = get_peft_model_state_dict(model, state_dict=stand_ins, save_embedding_layers=False)
    return {names[id(tensor)]: name for name, tensor in saved.items() if names[id(tensor)] != name}


def _set_dtype(config: Path, tensors: dict[str, Tensor]) -> None:
    """Name the dtype of weights that were published in another one than they are trained in."""
    if not config.exists():
        return
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.is_floating_point() and tensor.itemsize > 1:  # not what is quantised
            sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    found = read_object(config)
    if sizes:
        found["dtype"] = sizes.most_common(1)[0][0]
        found.pop("torch_dtype", None)
    config.write_text(json.dumps(found, indent=2) + "\n")
