"""A model or tokenizer that transformers cannot load: the sentence about it, in place of twenty of its frames."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_CHARACTERS = 300  # of the reason; the log has all


def sentence_about(error: Exception, path: Path) -> str | None:
    """What is wrong, where a `from_pretrained` raised `error`; None: something else did. The traceback goes to stderr.

    Args:
        path: of the setup file, whose line is named.
    """
    name = _not_loaded(error) if isinstance(error, OSError) else None
    if name is None:
        return None
    traceback.print_exception(error, file=sys.stderr)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    place = f"line {lines[-1]} of {path}" if lines else str(path)
    return (
        f"{name} cannot be loaded ({place}): {' '.join(str(error).split())[:_CHARACTERS]}\n"
        "Give the name of a model of the hub, or a folder with its config.json. Without a network it must have been "
        "downloaded before; a private or gated one needs HF_TOKEN. The traceback is in the log."
    )


def _not_loaded(error: Exception) -> str | None:
    """What a `from_pretrained` on the way to the error was to load."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        wanted = frame.f_locals.get("pretrained_model_name_or_path")
        if frame.f_code.co_name == "from_pretrained" and isinstance(wanted, (str, os.PathLike)):
            return str(wanted)
    return None
