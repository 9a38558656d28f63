"""Leaves a function of TRL in its middle, at a method of the trainer that `leave` was put in the place of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


class Left(BaseException):  # not an `Exception`: TRL's loop catches those of tools, and the user's trainer may do so
    """Where TRL was left: the arguments of the method."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.arguments, self.keywords = arguments, keywords


def leave(*arguments: Any, **keywords: Any) -> NoReturn:
    raise Left(arguments, keywords)


def left(function: Callable[..., Any], *arguments: Any) -> Left | None:
    """Where a call of the function was left; None: it came to its end."""
    try:
        function(*arguments)
    except Left as call:
        return call
    return None
