"""The few file operations that the queue is made of, on the directory it lives in.

`Files` is the seam: the queue does nothing to the disk except through it, so a test can fail, kill or record
any operation. Paths are relative to the queue's root, e.g. `queue/0000000042.a00_pending.safetensors`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from async_grpo.errors import BadFileError
from async_grpo.queue.codec import MAX_FILE_BYTES
from async_grpo.queue.names import JobName, SetAside, parse_name, parse_set_aside
from async_grpo.rundir.folders import check_folder, make_folder
from async_grpo.rundir.reading import open_plain, read_and_close

FOLDERS = ("queue", "done", "quarantine", "tmp", "alive")


class Files(Protocol):
    """What the queue asks of a file system. Every method raises `OSError` as the system call does."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, in no order. A file that is renamed during the call may be missing or there twice.

        `BadFileError` where one of the queue's own folders is something else.
        """

    def read(self, path: str) -> bytearray:
        """The whole file; `BadFileError` if it is not a regular file of ours, or too large."""

    def create(self, path: str, data: bytes) -> None:
        """Write a new file; fails if the path exists."""

    def rename(self, path: str, to: str) -> None:
        """Move a file, silently replacing what is at `to`."""

    def sync(self, path: str) -> None:
        """Return when a file's content, or the names in a folder, are on the disk."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def exists(self, path: str) -> bool:
        """Whether anything, be it a dangling link, has this path."""

    def make_folder(self, path: str) -> None:
        """Make a folder, 0700; nothing happens if it exists."""

    def close(self) -> None:
        """Release what it holds; it is not used afterwards."""


class OsFiles:
    """`Files` on a real directory."""

    def __init__(self, root: Path) -> None:
        self._path = root
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self, folder: str) -> list[str]:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        except NotADirectoryError as error:
            if folder not in FOLDERS:
                raise
            raise BadFileError(
                f"{self._path / folder} is not a directory (links are not followed). Put the folder back in its place."
            ) from error
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in entries]
        finally:
            os.close(fd)

    def read(self, path: str) -> bytearray:
        return read_and_close(open_plain(path, dir_fd=self._root), MAX_FILE_BYTES, own=True)

    def create(self, path: str, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600, dir_fd=self._root)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(fd, rest) :]
        finally:
            os.close(fd)

    def rename(self, path: str, to: str) -> None:
        os.rename(path, to, src_dir_fd=self._root, dst_dir_fd=self._root)

    def sync(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: str) -> None:
        os.unlink(path, dir_fd=self._root)

    def exists(self, path: str) -> bool:
        try:
            os.stat(path, dir_fd=self._root, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def make_folder(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=self._root)

    def close(self) -> None:
        if self._root >= 0:
            os.close(self._root)
            self._root = -1


def job_files(files: Files, folder: str = "queue") -> list[JobName]:
    """Every job file in a folder, in no order. Other files are not ours and are ignored, as is a link to a folder."""
    try:
        entries = files.names(folder)
    except NotADirectoryError:
        return []
    return [name for entry in entries if (name := parse_name(entry)) is not None]


def set_aside_files(files: Files) -> list[SetAside]:
    """Every job file in quarantine/, in no order."""
    return [aside for entry in files.names("quarantine") if (aside := parse_set_aside(entry)) is not None]


def done_folders(files: Files) -> list[str]:
    """The shards of done/, oldest jobs first."""
    return [f"done/{name}" for name in sorted(files.names("done")) if name.isdigit()]


def prepare_root(root: Path) -> None:
    """Make the queue's folders, 0700, and check that no other user can change them.

    `RunDirError` says what is wrong.
    """
    check_folder(root)
    for folder in (root, *(root / name for name in FOLDERS)):
        make_folder(folder)
