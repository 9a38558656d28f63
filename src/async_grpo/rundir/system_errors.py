"""What the operating system refuses, in a sentence: which path, why, and what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

MOST_NAME = 120  # characters of a path that is shown; one that is too long would fill the screen

_SENTENCES = {
    errno.EROFS: "its file system is read-only. Choose another place, or remount it for writing.",
    errno.EACCES: "this user has no right to do that. Choose another place, or change the rights there.",
    errno.EPERM: "this user has no right to do that. Choose another place, or change the rights there.",
    errno.ENOTDIR: "a part of this path is a file, not a folder. Choose another place.",
    errno.EISDIR: "it is a folder, where a file is due. Choose another name.",
    errno.ENAMETOOLONG: "the name is too long for this file system. Choose a shorter one.",
    errno.EFBIG: "the file has come to the largest size that is allowed. Raise the limit (ulimit -f), or write less.",
    errno.ENOSPC: "the disk is full. Make room, or choose another place.",
    errno.EDQUOT: "this user's share of the disk is full. Make room, or choose another place.",
}
GONE = "The folder that this command was started in has been deleted. Change to another one (cd), and try again."
_TEMPORARY = re.compile(r"\.([^/]+)\.[0-9a-f]{32}$")  # what is renamed once it is whole
_OUTPUT = "The output of this command, or a file that it writes"


def sentence_of(error: OSError) -> str | None:
    """None for an error of another kind."""
    if isinstance(error, FileNotFoundError) and is_started_nowhere():
        return GONE
    if (why := _SENTENCES.get(error.errno or 0)) is None:
        return None
    return f"{_OUTPUT if error.filename is None else _shown(error.filename)}: {why}"


def is_started_nowhere() -> bool:
    """Whether the working directory has been deleted."""
    try:
        os.getcwd()  # noqa: PTH109  # `Path.cwd` does more
    except FileNotFoundError:
        return True
    return False


def why_not_writable(folder: Path) -> str | None:
    """Why no file can be made in a folder that exists. A file without a name is made there, which leaves nothing."""
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
            return sentence_of(error)
    return None


def _shown(name: str | bytes | int) -> str:
    text = os.fsdecode(name) if isinstance(name, (str, bytes)) else f"file {name}"
    text = _TEMPORARY.sub(r"\1", text)
    return text if len(text) <= MOST_NAME else f"{text[:MOST_NAME]}…"
