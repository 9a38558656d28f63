"""Where a run directory may be: a directory of this user that no other can change, on a local disk.

The directory itself and its folders are checked by a descriptor that follows no link. Links above it are followed, as
everywhere: SECURITY.md says what that means.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from async_grpo.errors import RunDirError
from async_grpo.rundir.system_errors import why_not_writable

_NETWORK_FILE_SYSTEMS = {0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB", 0x517B: "SMB"}


def check_folder(root: Path) -> None:
    """`RunDirError` where no run can be: on a network's disk, where others can change it, or this user cannot.

    Changes nothing. `root` need not exist yet.
    """
    try:
        require_text(str(root))
    except ValueError as error:
        raise RunDirError(f"{str(root)!r} cannot be a run directory: {error}. Choose another name.") from error
    if os.path.lexists(root):
        os.close(open_folder(root))
    require_writable(root)
    network = network_file_system(nearest_existing(root))
    if network:
        raise RunDirError(
            f"{root} is on {network}. A run needs a local disk: on {network} a rename may report a failure that it "
            "was not, locks follow other rules, and changes by other hosts go unnoticed. Choose a folder on a "
            "local disk."
        )


def require_text(name: str) -> None:
    """`ValueError` for what no argument of a process or no record of a run can hold."""
    if "\0" in name:
        raise ValueError("it has a null character in it")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it is not UTF-8") from error


def require_writable(root: Path) -> None:
    """`RunDirError` where this user can make no file in `root`, or no folder of this name. Changes nothing."""
    if (reason := why_not_writable(nearest_existing(root))) is not None:
        raise RunDirError(reason)


def make_folder(folder: Path, *, in_private: bool = False) -> Path:
    """A folder that only this user may enter: a new one, or the one that is there. `RunDirError` if it is not ours.

    Args:
        in_private: it is in a folder that only this user may enter, so that nobody has used what its mode permits.
    """
    if not os.path.lexists(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = open_folder(folder, any_mode=in_private)
    try:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return folder


def open_folder(folder: Path, *, any_mode: bool = False) -> int:
    """A descriptor of a directory of this user. `RunDirError` if it is a link, or others can write to it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise RunDirError(f"{folder} is not a directory (links are not followed). Choose another folder.") from error
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        reason = f"{folder} belongs to user {status.st_uid}, this process runs as {os.geteuid()}. Choose another one."
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not any_mode:
        reason = (
            f"{folder} can be written by others (mode {stat.S_IMODE(status.st_mode):o}), who could make "
            f"workers run their jobs. Take that right away: chmod go-w {folder}"
        )
    else:
        return descriptor
    os.close(descriptor)
    raise RunDirError(reason)


def is_ours(folder: Path) -> bool:
    """Whether it is a directory of this user and no link: another user may have put one of this name there."""
    with suppress(OSError):
        status = folder.lstat()
        return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
    return False


def check_own(folder: Path) -> None:
    """`RunDirError` where it is there, and is a link or another user's: what lies in it is imported."""
    if os.path.lexists(folder):
        os.close(open_folder(folder, any_mode=True))


def nearest_existing(path: Path) -> Path:
    """The path, or the folder nearest above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def network_file_system(path: Path) -> str | None:
    buffer = ctypes.create_string_buffer(512)  # struct statfs, larger than any; f_type is its first long
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), buffer) != 0:
        return None
    magic = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _NETWORK_FILE_SYSTEMS.get(magic)
