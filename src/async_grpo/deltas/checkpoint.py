"""A version as a folder that transformers or PEFT loads: the weights, and what the run kept of configuration."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

from async_grpo.deltas.chain import MODEL, Chain
from async_grpo.errors import DeltaChainError
from async_grpo.rundir.files import room_for
from async_grpo.rundir.reading import read_file, read_object
from async_grpo_ipc.delta import Buffers

WEIGHTS = {"model": "model.safetensors", "adapter": "adapter_model.safetensors"}
MAX_FILE_BYTES = 1 << 30  # of a tokenizer or a configuration
_FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def write_checkpoint(chain: Chain, version: int, folder: Path) -> Path:
    """Rebuild `version` into a new folder; returns the file of weights.

    Raises:
        DeltaChainError: the folder exists, or the version cannot be rebuilt.
    """
    if folder.exists():
        raise DeltaChainError(f"{folder} exists already. Name a folder that does not.")
    buffers = chain.rebuild(version)
    name = WEIGHTS.get(chain.about.kind, WEIGHTS["model"])
    building = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        with room_for(folder):
            building.mkdir(parents=True)
            if (chain.folder / MODEL).is_dir():
                _copy_files(chain.folder / MODEL, building)
            _set_dtype(building / "config.json", buffers)
            write_safetensors(building / name, {chain.about.names.get(key, key): one for key, one in buffers.items()})
            building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return folder / name


def _copy_files(source: Path, target: Path) -> None:
    """Copy what is below `source`. `BadFileError` names what is no plain file: a link may lead to a secret."""
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            place.mkdir()
        else:
            place.write_bytes(read_file(path, MAX_FILE_BYTES))


def write_safetensors(path: Path, buffers: Buffers) -> None:
    """The plain format, without torch: every dtype as its bits."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, buffer in buffers.items():
        offsets = [at, at + buffer.nbytes]
        header[name] = {"dtype": buffer.dtype, "shape": buffer.shape, "data_offsets": offsets}
        at += buffer.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for buffer in buffers.values():
            file.write(buffer.data.data)


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
    import torch
    from peft import get_peft_model_state_dict

    stand_ins = {name: torch.empty(0, dtype=torch.uint8, device="cpu") for name in model.state_dict()}
    names = {id(tensor): name for name, tensor in stand_ins.items()}
    saved = get_peft_model_state_dict(model, state_dict=stand_ins, save_embedding_layers=False)
    return {names[id(tensor)]: name for name, tensor in saved.items() if names[id(tensor)] != name}


def _set_dtype(config: Path, buffers: Buffers) -> None:
    """Name the dtype of weights that were published in another one than they are trained in."""
    if not config.exists():
        return
    sizes: Counter[str] = Counter()
    for buffer in buffers.values():
        if buffer.dtype in _FLOATS:
            sizes[_FLOATS[buffer.dtype]] += buffer.nbytes
    found = read_object(config)
    if sizes:
        found["dtype"] = sizes.most_common(1)[0][0]
        found.pop("torch_dtype", None)
    config.write_text(json.dumps(found, indent=2) + "\n")
