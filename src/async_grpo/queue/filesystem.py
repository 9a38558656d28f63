"""The few file operations that the queue is made of, and the checks of the directory it lives in.

`Files` is the seam: the queue does nothing to the disk except through it, so a test can fail, kill or record
any operation. Paths are relative to the queue's root, e.g. `queue/0000000042.a00_pending.safetensors`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from async_grpo.errors import BadFileError, RunDirError
from async_grpo.queue.codec import MAX_FILE_BYTES
from async_grpo.queue.names import JobName, SetAside, parse_name, parse_set_aside

FOLDERS = ("queue", "done", "quarantine", "tmp", "alive")

_NETWORK_FILE_SYSTEMS = {0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB"}
_UNREADABLE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM, errno.EIO)


class Files(Protocol):
    """What the queue asks of a file system. Every method raises `OSError` as the system call does."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, in no order. A file that is renamed during the call may be missing or there twice."""

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
        self._root = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def names(self, folder: str) -> list[str]:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._root)
        try:
            with os.scandir(fd) as entries:
                return [entry.name for entry in entries]
        finally:
            os.close(fd)

    def read(self, path: str) -> bytearray:
        try:  # O_NONBLOCK: opening a named pipe must not wait for a writer
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=self._root)
        except OSError as error:
            if error.errno in _UNREADABLE:
                raise BadFileError(f"it cannot be read: {error.strerror} (links are not followed)") from error
            raise
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise BadFileError("it is not a regular file")
            if status.st_uid != os.geteuid():
                raise BadFileError(f"it belongs to user {status.st_uid}")
            if status.st_size > MAX_FILE_BYTES:
                raise BadFileError(f"{status.st_size:,} bytes are over the limit of {MAX_FILE_BYTES:,}")
            return _read_all(fd, status.st_size)
        finally:
            os.close(fd)

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


def _read_all(fd: int, size: int) -> bytearray:
    """One buffer, which the arrays of a group will be views of."""
    data = bytearray(size)
    done = 0
    with memoryview(data) as view:
        while done < size and (got := os.readv(fd, [view[done:]])):  # reads are short only for very large files
            done += got
    del data[done:]
    return data


def prepare_root(root: Path) -> None:
    """Make the queue's folders, 0700, and check that no other user can change them.

    `RunDirError` says what is wrong.
    """
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_place(root)
    for name in FOLDERS:
        (root / name).mkdir(mode=0o700, exist_ok=True)
        _check_folder(root / name)


def check_place(root: Path) -> None:
    """`RunDirError` where no queue can be: on a network's disk, or in a folder that others can change.

    `root` need not exist yet.
    """
    if root.exists():
        _check_folder(root)
    network = network_file_system(nearest_existing(root))
    if network:
        raise RunDirError(
            f"{root} is on {network}. The queue needs a local disk: on {network} a rename may report a "
            "failure that it was not, locks follow other rules, and changes by other hosts go unnoticed. "
            "Choose another --run-dir."
        )


def nearest_existing(path: Path) -> Path:
    """The path, or the folder nearest above it that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _check_folder(folder: Path) -> None:
    status = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(status.st_mode):
        raise RunDirError(f"{folder} is not a directory (links are not followed). Choose another --run-dir.")
    if status.st_uid != os.geteuid():
        raise RunDirError(f"{folder} belongs to user {status.st_uid}, this process runs as {os.geteuid()}.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise RunDirError(
            f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), who could make "
            f"workers run their jobs. Take that right away: chmod go-w {folder}"
        )


def network_file_system(path: Path) -> str | None:
    """Name of the network file system that `path` is on, or None."""
    buffer = ctypes.create_string_buffer(512)  # struct statfs, larger than any; f_type is its first long
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        return None
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _NETWORK_FILE_SYSTEMS.get(magic)
