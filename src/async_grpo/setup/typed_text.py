"""Values that arrive as text, such as those of `key=value` on a command line, as values of a type."""

from __future__ import annotations

import json
import math
from typing import Any

from async_grpo.errors import UsageError

_SHOWN = 100  # characters of what an error quotes


def typed(name: str, value: Any, kind: Any) -> Any:
    """Give a text its type.

    `" 1e-6 "` -> 1e-6, `"TRUE"` -> True, `'"mt_grpo"'` (JSON within JSON, as SageMaker's SDK sends) -> mt_grpo.

    Args:
        name: of the value, for the error.
        value: a text, or a number or a truth of JSON.
        kind: bool, int, float or str.

    Raises:
        UsageError: the value is not of this type.
    """
    if isinstance(value, (dict, list)) or value is None:
        raise UsageError(f"{name} must be a text, a number or true or false, got {json.dumps(value)[:_SHOWN]}.")
    text = str(value).strip()
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        try:
            text = str(json.loads(text)).strip()
        except ValueError:
            raise UsageError(f"{name} is in quotes and not valid JSON: {text[:_SHOWN]}.") from None
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0"):
            raise UsageError(f"{name} must be true or false, got {text!r}.")
        return text.lower() in ("true", "1")
    if kind is str:
        if not text:
            raise UsageError(f"{name} is empty.")
        return text
    try:
        number = kind(text)
    except ValueError:
        raise UsageError(f"{name} must be {'a whole number' if kind is int else 'a number'}, got {text!r}.") from None
    if not math.isfinite(number):
        raise UsageError(f"{name} must be a finite number, got {text!r}.")
    return number
