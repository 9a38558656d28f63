"""The published handle: one JSON file, written whole by rename, that says where the weights are and how they
lie.

It is data, never code: nothing is unpickled, every field is checked, and a file that another user could have
written is refused. docs/ipc.md specifies it for readers in other languages.

torch is imported only where layouts are read: `async-grpo status` looks at the slots without it.
"""

import json
import logging
import os
import stat
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_grpo_ipc import fields
from async_grpo_ipc.errors import HandleFileError
from async_grpo_ipc.locks import OwnedFd, open_regular

if TYPE_CHECKING:
    from async_grpo_ipc.layout import Layout, TensorSpec

logger = logging.getLogger(__name__)

FORMAT = "async-grpo-ipc"
FORMAT_VERSION = 2
REMEDY = "Delete it and restart the exporter, which writes a new one."

PATH_VARIABLE = "CUDA_IPC_HANDLE_PATH"
DEFAULT_PATH = Path("worker/ps_ipc_handle.json")
MAX_FILE_BYTES = 256 << 20  # some 300 bytes a tensor
VERSION_FILE_BYTES = 160  # padded with spaces: every version is one write of the same length, in place


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHandle:
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


def write_handle(path: Path, handle: WeightsHandle) -> None:
    from async_grpo_ipc.layout import described

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
        "static": described(handle.static),
        "slot": described(handle.slot),
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
    except IsADirectoryError as error:
        temporary.unlink()
        raise HandleFileError(f"{path} cannot be written: it is a directory. Move it away, then continue.") from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_handle(path: Path) -> WeightsHandle:
    """Read and check the file. Raises `HandleFileError` that says what is wrong with it."""
    with _sensible(path):
        return _handle_from_json(read_body(path))


def read_head(path: Path) -> fields.Head:
    """The same of the few fields that it takes to look at the slots; needs no torch."""
    with _sensible(path):
        return fields.head(read_body(path))


@contextmanager
def _sensible(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise HandleFileError(f"{path} has a field that makes no sense: {error!r}. {REMEDY}") from error


def read_body(path: Path) -> dict[str, Any]:
    """The JSON object in the file, without its checksum. Raises `HandleFileError` that says what is wrong with it."""
    raw = _read_trusted(path)
    try:
        body = json.loads(raw.decode("ascii"))
        checksum = crc32({name: value for name, value in body.items() if name != "crc32"}) if type(body) is dict else 0
    except ValueError as error:
        raise HandleFileError(f"{path} is not whole JSON ({error}). {REMEDY}") from error
    except RecursionError:
        raise HandleFileError(f"{path} is nested too deeply. {REMEDY}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise HandleFileError(f"{path} is not a handle file of {FORMAT}. Give the path that the exporter was given.")
    if body.get("format_version") != FORMAT_VERSION:
        raise HandleFileError(
            f"{path} has format version {body.get('format_version')!r}, this package reads "
            f"{FORMAT_VERSION}. Use the same version of async_grpo_ipc on both sides."
        )
    if body.pop("crc32", None) != checksum:
        raise HandleFileError(f"{path} fails its checksum: it was edited or damaged. {REMEDY}")
    return body


def _read_trusted(path: Path) -> bytes:
    fd = open_regular(path, os.O_RDONLY)
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
        if found.st_size > MAX_FILE_BYTES:
            raise HandleFileError(
                f"{path} has {found.st_size:,} bytes, more than the {MAX_FILE_BYTES:,} of any handle. {REMEDY}"
            )
        return file.read(MAX_FILE_BYTES)


def crc32(body: Mapping[str, Any]) -> int:
    """CRC32 of the object as JSON with sorted keys, no spaces, and ASCII escapes."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii"))


def _handle_from_json(body: dict[str, Any]) -> WeightsHandle:
    from async_grpo_ipc.layout import read_layout

    handle = WeightsHandle(
        **fields.head(body)._asdict(),
        pid_namespace=fields.text(body["pid_namespace"]),
        boot_id=fields.text(body["boot_id"]),
        created=fields.number(body["created"]),
        memory=fields.memory(body["memory"]),
        static=read_layout(body["static"]),
        slot=read_layout(body["slot"]),
        tied={fields.text(name): fields.text(primary) for name, primary in body["tied"].items()},
        complete=fields.flag(body["complete"]),
        buffers=fields.flag(body["buffers"]),
    )
    if len(handle.memory["blocks"]) != handle.slots + 1:
        raise ValueError(f"{handle.slots} slots and {len(handle.memory['blocks'])} blocks")
    for layout, block in zip((handle.static, *[handle.slot] * handle.slots), handle.memory["blocks"], strict=True):
        if layout.nbytes > block["nbytes"]:
            raise ValueError(f"a layout of {layout.nbytes} bytes in a block of {block['nbytes']}")
    handle.specs_by_name()  # a tied name must have a primary
    return handle


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
                self._fd = OwnedFd(open_regular(self._path, os.O_WRONLY), str(self._path))
            else:
                os.pwrite(self._fd.fileno(), line.encode("ascii"), 0)
        except (OSError, HandleFileError) as error:
            logger.warning("Version %d is published, but %s could not be written: %s.", version, self._path, error)

    def close(self) -> None:
        if self._fd is not None:
            self._fd.close()
