"""Files that others may have planted in the place of ours, or that a crash has left there."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

HUGE = "a sparse file of 300 MiB"


def _link(path: Path) -> None:
    (path.parent / "victim").write_text('{"secret": 1}\n')
    path.symlink_to(path.parent / "victim")


def _listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


class NoFile(NamedTuple):
    """What is no plain file."""

    plant: Callable[[Path], object]
    reason: str  # a pattern of what a reader says


_LINKS = "it is a link|links are not followed"
NO_FILES: dict[str, NoFile] = {
    "a named pipe": NoFile(os.mkfifo, "named pipe|not a regular file"),
    "a link": NoFile(_link, _LINKS),
    "a link to nothing": NoFile(lambda path: path.symlink_to("nowhere"), _LINKS),
    "a link to a device": NoFile(lambda path: path.symlink_to("/dev/zero"), _LINKS),
    "a directory": NoFile(lambda path: path.mkdir(), "a directory|not a regular file"),
    "a socket": NoFile(_listening, "cannot be opened"),
}
NO_OBJECTS: dict[str, bytes] = {
    "nothing": b"",
    "zero bytes, as a power cut leaves them": b"\0" * 1000,
    "half an object": b"{",
    "a list": b"[]",
    "null": b"null",
    "another encoding": '{"format": "async-grpo-ipc"}'.encode("utf-16"),
    "no encoding": b"\xff\xfe",
    "a million brackets": b"[" * 10**6,
    "brackets in a field": b'{"format": "async-grpo-ipc", "x": ' + b"[" * 100_000,
    "500 levels": b'{"options": ' + b"[" * 500 + b"]" * 500 + b"}",  # json reads it, `dataclasses.asdict` fails on it
    "990 levels": b'{"format": "async-grpo-ipc", "format_version": 1, "x": ' + b"[" * 990 + b"]" * 990 + b"}",
    "a number of 5000 digits": b'{"format": "async-grpo-ipc", "x": ' + b"9" * 5000 + b"}",
}
"""Bytes that are no JSON object, or one that no record of ours can be."""


def plant(what: str, path: Path) -> Path:
    """Put the bad file of that name in the place of `path`, and return it."""
    if what in NO_FILES:
        NO_FILES[what].plant(path)
        return path
    path.touch(mode=0o600)
    if what == HUGE:
        os.truncate(path, 300 << 20)
    else:
        path.write_bytes(NO_OBJECTS[what])
    return path
