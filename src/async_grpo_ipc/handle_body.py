"""Reading the published handle as what it is, a checked JSON object, without knowing what a tensor is.

Apart from `handle_file`, which makes dtypes and layouts of it, so that who only wants to look needs no torch.
"""

import json
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from async_grpo_ipc.errors import HandleFileError

FORMAT = "async-grpo-ipc"
FORMAT_VERSION = 1
REMEDY = "Delete it and restart the exporter, which writes a new one."


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
                f"be what the exporter wrote. Check who did that, then `chmod 600 {path}`."
            )
        return file.read()


def crc32(body: Mapping[str, Any]) -> int:
    """CRC32 of the object as JSON with sorted keys, no spaces, and ASCII escapes."""
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii"))
