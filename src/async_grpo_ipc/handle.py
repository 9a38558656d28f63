"""The published handle: one JSON file, written whole by rename, that says where the weights are and how they
lie.

It is data, never code: nothing is unpickled, every field is checked, and a file that another user could have
written is refused. docs/ipc.md specifies it for readers in other languages.

torch is imported only where layouts are read: `async-grpo status` looks at the slots without it.
"""

import json
import logging
import math
import os
import stat
import time
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo_ipc.control import MAX_SLOTS
from async_grpo_ipc.errors import HandleFileError
from async_grpo_ipc.locks import OwnedFd

if TYPE_CHECKING:
    import torch

    from async_grpo_ipc.layout import Layout, TensorSpec

logger = logging.getLogger(__name__)

FORMAT = "async-grpo-ipc"
FORMAT_VERSION = 1
REMEDY = "Delete it and restart the exporter, which writes a new one."

PATH_VARIABLE = "CUDA_IPC_HANDLE_PATH"
DEFAULT_PATH = Path("worker/ps_ipc_handle.json")
VERSION_FILE_BYTES = 160  # padded with spaces: every version is one write of the same length, in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Everything a reader needs to know about one generation, that is one life of an exporter."""

    generation: str  # 32 hex digits
    pid: int
    pid_namespace: str  # as in /proc/self/ns/pid
    boot_id: str  # of this machine since it was started
    created: float  # seconds since the epoch
    slots: int
    control_fd: int
    control_inode: int
    memory: Mapping[str, Any]  # what the memory backend's `describe()` said
    static: "Layout"  # block 0: tensors that never change
    slot: "Layout"  # blocks 1..slots: tensors of one version
    tied: Mapping[str, str]  # second name -> the name it is stored under
    complete: bool  # whether every parameter of the exporter's model is in here
    buffers: bool  # whether the model's buffers are in here

    def specs_by_name(self) -> "dict[str, TensorSpec]":
        """Every published name, the tied ones included."""
        stored = {spec.name: spec for spec in (*self.static.tensors, *self.slot.tensors)}
        return stored | {name: stored[primary] for name, primary in self.tied.items()}


def handle_path(path: str | Path | None = None) -> Path:
    """`path`, or what CUDA_IPC_HANDLE_PATH says, or `worker/ps_ipc_handle.json`; absolute: `chdir` does no harm."""
    return Path(path if path is not None else os.environ.get(PATH_VARIABLE, DEFAULT_PATH)).absolute()


def version_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}_version.json")


def pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def write_handle(path: Path, handle: Handle) -> None:
    body = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "generation": handle.generation,
        "pid": handle.pid,
        "pid_namespace": handle.pid_namespace,
        "boot_id": handle.boot_id,
        "created": handle.created,
        "slots": handle.slots,
        "control": {"fd": handle.control_fd, "inode": handle.control_inode},
        "memory": dict(handle.memory),
        "static": _layout_to_json(handle.static),
        "slot": _layout_to_json(handle.slot),
        "tied": dict(handle.tied),
        "complete": handle.complete,
        "buffers": handle.buffers,
    }
    replace_whole(path, json.dumps(body | {"crc32": crc32(body)}, indent=1).encode("ascii"))


def replace_whole(path: Path, payload: bytes) -> None:
    """Readers see the old file or the new one, never a part. Mode 0600."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(payload)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_handle(path: Path) -> Handle:
    """Read and check the file. Raises `HandleFileError` that says what is wrong with it."""
    body = read_body(path)
    try:
        return _handle_from_json(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise HandleFileError(f"{path} has a field that makes no sense: {error!r}. {REMEDY}") from error


def read_body(path: Path) -> dict[str, Any]:
    """The JSON object in the file, without its checksum. Raises `HandleFileError` that says what is wrong with it."""
    try:
        raw = _read_trusted(path)
    except FileNotFoundError as error:
        raise HandleFileError(
            f"{path} does not exist: no exporter has published there yet, or it has ended."
        ) from error
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise HandleFileError(f"{path} is not whole JSON ({error}). {REMEDY}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise HandleFileError(f"{path} is not a handle file of {FORMAT}. Give the path that the exporter was given.")
    if body.get("format_version") != FORMAT_VERSION:
        raise HandleFileError(
            f"{path} has format version {body.get('format_version')!r}, this package reads "
            f"{FORMAT_VERSION}. Use the same version of async_grpo_ipc on both sides."
        )
    if body.pop("crc32", None) != crc32(body):
        raise HandleFileError(f"{path} fails its checksum: it was edited or damaged. {REMEDY}")
    return body


def _read_trusted(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise HandleFileError(
                f"{path} belongs to user {found.st_uid} and this process runs as {os.geteuid()}. Run the "
                "exporter and its readers as the same user."
            )
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise HandleFileError(
                f"{path} can be written by others (mode {stat.S_IMODE(found.st_mode):04o}), so it may not "
                f"be what the exporter wrote. Find out which process did that, then `chmod 600 {path}`."
            )
        return file.read()


def crc32(body: Mapping[str, Any]) -> int:
    """CRC32 of the object as JSON with sorted keys, no spaces, and ASCII escapes."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii"))


def _layout_to_json(layout: "Layout") -> dict[str, Any]:
    return {
        "nbytes": layout.nbytes,
        "buckets": [{"dtype": _name(b.dtype), "offset": b.offset, "nbytes": b.nbytes} for b in layout.buckets],
        "tensors": [
            {
                "name": spec.name,
                "dtype": _name(spec.dtype),
                "shape": list(spec.shape),
                "stride": list(spec.stride),
                "offset": spec.offset,
            }
            for spec in layout.tensors
        ],
    }


def _handle_from_json(body: dict[str, Any]) -> Handle:
    handle = Handle(
        generation=_generation(body["generation"]),
        pid=_integer(body["pid"], at_least=1),
        pid_namespace=_text(body["pid_namespace"]),
        boot_id=_text(body["boot_id"]),
        created=float(body["created"]),
        slots=_integer(body["slots"], at_least=1),
        control_fd=_integer(body["control"]["fd"]),
        control_inode=_integer(body["control"]["inode"]),
        memory=_memory(body["memory"]),
        static=_layout_from_json(body["static"]),
        slot=_layout_from_json(body["slot"]),
        tied={_text(name): _text(primary) for name, primary in body["tied"].items()},
        complete=bool(body["complete"]),
        buffers=bool(body["buffers"]),
    )
    if handle.slots > MAX_SLOTS or len(handle.memory["blocks"]) != handle.slots + 1:
        raise ValueError(f"{handle.slots} slots and {len(handle.memory['blocks'])} blocks")
    for layout, block in zip((handle.static, *[handle.slot] * handle.slots), handle.memory["blocks"], strict=True):
        if layout.nbytes > _integer(block["nbytes"]):
            raise ValueError(f"a layout of {layout.nbytes} bytes in a block of {block['nbytes']}")
    handle.specs_by_name()  # a tied name must have a primary
    return handle


def _memory(body: dict[str, Any]) -> dict[str, Any]:
    if body["kind"] not in ("posix", "cuda"):
        raise ValueError(f"memory of kind {body['kind']!r}")
    if body["kind"] == "posix":
        total = _integer(body["nbytes"])
        _integer(body["fd"]), _integer(body["inode"])
        if any(_integer(block["offset"]) + _integer(block["nbytes"]) > total for block in body["blocks"]):
            raise ValueError(f"a block that ends behind {total} bytes")
    elif any(len(bytes.fromhex(block["handle"])) != 64 for block in body["blocks"]):
        raise ValueError("a CUDA handle that is not 64 bytes")
    return body


def _layout_from_json(body: dict[str, Any]) -> "Layout":
    from async_grpo_ipc.layout import Bucket, Layout

    nbytes = _integer(body["nbytes"])
    specs = tuple(_spec_from_json(entry, nbytes) for entry in body["tensors"])
    buckets = tuple(Bucket(_dtype(b["dtype"]), _integer(b["offset"]), _integer(b["nbytes"])) for b in body["buckets"])
    return Layout(specs, buckets, nbytes)


def _spec_from_json(body: dict[str, Any], block_bytes: int) -> "TensorSpec":
    from async_grpo_ipc.layout import ALIGNMENT, TensorSpec

    shape = tuple(_integer(length) for length in body["shape"])
    stride = tuple(_integer(step) for step in body["stride"])
    spec = TensorSpec(_text(body["name"]), _dtype(body["dtype"]), shape, stride, _integer(body["offset"]))
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True)) if math.prod(shape) else -1
    if spec.offset % ALIGNMENT or spec.offset + (last + 1) * spec.dtype.itemsize > block_bytes:
        raise ValueError(f"tensor {spec.name} at offset {spec.offset} of a block of {block_bytes} bytes")
    return spec


def _generation(value: Any) -> str:
    if len(bytes.fromhex(_text(value))) != 16:
        raise ValueError(f"generation {value!r}")
    return str(value)


def _integer(value: Any, at_least: int = 0) -> int:
    if type(value) is not int or value < at_least:
        raise ValueError(f"{value!r} where an integer of at least {at_least} belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} where text belongs")
    return value


def _name(dtype: "torch.dtype") -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: Any) -> "torch.dtype":
    import torch

    dtype = getattr(torch, _text(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r}, which this torch does not have")
    return dtype


class VersionFile:
    """Created whole with the first version, then overwritten in place: 3 us, where a rename costs a
    millisecond on a disk.
    """

    def __init__(self, path: Path, generation: str) -> None:
        self._path = path
        self._generation = generation
        self._fd: OwnedFd | None = None

    def show(self, version: int) -> None:
        """Write the version. A full disk is worth a warning, not the end of a training run."""
        body = f'{{"global_step": {version}, "timestamp": {time.time()}, "generation": "{self._generation}"}}'
        line = body.ljust(VERSION_FILE_BYTES - 1) + "\n"
        try:
            if self._fd is None:
                replace_whole(self._path, line.encode("ascii"))
                self._fd = OwnedFd(os.open(self._path, os.O_WRONLY | os.O_CLOEXEC), str(self._path))
            else:
                os.pwrite(self._fd.fileno(), line.encode("ascii"), 0)
        except OSError as error:
            logger.warning("Version %d is published, but %s could not be written: %s.", version, self._path, error)

    def close(self) -> None:
        if self._fd is not None:
            self._fd.close()
