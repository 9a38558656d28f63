"""Python literals, in a time that grows as their length does."""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from async_grpo.tasks.task_files import LARGEST

_STRING = r"Q(?!QQ)[^\\Q\r\n]*+(?:\\.[^\\Q\r\n]*+)*+Q | QQQ[^\\Q]*+(?:(?:\\.|Q(?!QQ))[^\\Q]*+)*+QQQ"
_STRINGS = " | ".join(_STRING.replace("Q", quote) for quote in ("'", '"'))
_WITHOUT_F_STRINGS = re.compile(  # of which Python reads the fields in a time that grows as the square of their number
    rf"""(?: [bru]{{0,2}} (?: {_STRINGS} ) | \w++ (?!['"]) | \#[^\r\n]*+ | [^\w'"\#]++ )*+""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def literal_of(text: str, longest: int = LARGEST) -> Any:
    """What a literal says that JSON could say too: no sets, and keys that are texts, whose hashes nobody chose.

    Args:
        longest: characters that are read.

    Raises:
        ValueError, SyntaxError, TypeError, RecursionError, MemoryError: it is none.
    """
    if len(text) > longest or not _WITHOUT_F_STRINGS.fullmatch(text):
        raise ValueError("too long, or no literal")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes such as \d, which are what they look like
        tree = ast.parse(text.lstrip(" \t"), mode="eval")
    for node in ast.walk(tree):
        keys = getattr(node, "keys", ())
        if isinstance(node, ast.Set) or not all(isinstance(getattr(key, "value", None), str) for key in keys):
            raise ValueError("a set, or a key that is no text")
    return ast.literal_eval(tree)
