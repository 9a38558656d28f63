"""Notes of the processes of a check: a file of lines each, and a file of tensors for each batch that is trained on."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo.formatting import printable

if TYPE_CHECKING:
    import torch

SERVER, WORKER, PLAIN = "server", "worker", "plain"
SHOWN = 60  # characters of a value that a line may quote
Note = dict[str, Any]


class Notes:
    """Appends to the notes of one role in `folder`; threads may share it."""

    def __init__(self, folder: Path, role: str) -> None:
        self.folder, self.role, self._lock = folder, role, threading.Lock()
        self._batches, self._only = 0, ""

    def keep_only(self, kind: str) -> None:
        """Drop notes of other kinds from now on."""
        self._only = kind

    def add(self, kind: str, **note: Any) -> None:
        if self._only not in ("", kind):
            return
        line = json.dumps({"kind": kind, **note}, default=str)
        with self._lock, (self.folder / f"{self.role}.jsonl").open("a") as file:
            file.write(line + "\n")

    def add_batch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep the tensors of the next micro-batch."""
        from safetensors.torch import save_file

        kept = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        save_file(kept, self.folder / f"{self.role}-{self._batches:06}.safetensors")
        self._batches += 1


def notes_of(folder: Path, role: str) -> list[Note]:
    path = folder / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def batches_of(folder: Path, role: str) -> Iterator[dict[str, Any]]:
    """The tensors of each micro-batch, as numpy arrays: bf16 as float32."""
    from safetensors.torch import load_file

    for path in sorted(folder.glob(f"{role}-*.safetensors")):
        yield {name: (it.float() if it.is_floating_point() else it).numpy() for name, it in load_file(path).items()}


def noted(value: Any) -> list[str]:
    """A value as notes have it: a digest of all of it, and its beginning."""
    whole = json.dumps(_plain(value), sort_keys=True)
    return [hashlib.blake2b(whole.encode(), digest_size=8).hexdigest(), shown(value)]


def shown(value: Any) -> str:
    text = printable(repr(value)).replace("\n", " ")
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process that has an equal value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(each), sort_keys=True) for each in value)
    kind = type(value).__name__
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().float().numpy()
    if hasattr(value, "tobytes"):  # an array, an image
        return [kind, str(getattr(value, "shape", "")), hashlib.blake2b(value.tobytes()).hexdigest()]
    text = repr(value)
    return [kind, "" if " at 0x" in text else text]
