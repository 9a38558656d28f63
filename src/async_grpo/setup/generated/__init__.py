"""Setup files that Async-GRPO writes, for trainers that the user has in another form: they lie in the user's cache.

`trl_command` is for the arguments of `trl grpo`, `sent_function` for a function that has no file. Without torch, until
`trl_command` builds the trainer.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from async_grpo.errors import SetupFileError
from async_grpo.rundir.folders import make_folder

GENERATED = "# Written by Async-GRPO: nothing beside it is imported, unless you delete this line.\n"
"""The first line of each."""


def write_setup_file(name: str, text: str) -> Path:
    """The file with this text below `GENERATED`; the same text is the same file, so that a resume finds it.

    Raises:
        SetupFileError: the user's cache cannot be written.
    """
    text = GENERATED + text
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "async-grpo" / "setup_files"
    path = folder / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        make_folder(folder)
        unfinished.write_text(text)
        unfinished.replace(path)
    except OSError as error:
        raise SetupFileError(
            f"The setup file of the run cannot be written into {folder}: {error.strerror}. Set XDG_CACHE_HOME to a "
            "folder that this user may write to."
        ) from error
    return path
