"""How values are shown to people: durations, numbers of things, bytes, prompts and completions.

Every command, log line and page uses these functions, so that one value looks the same everywhere. What a model wrote
goes through `printable` before it reaches a terminal.
"""

from __future__ import annotations

import json
from typing import Any
from unicodedata import category


def for_people(seconds: float) -> str:
    """A duration: `0.4 s`, `12 s`, `7 min`, `3 h 20 min`, `2 d 4 h`."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def eta(seconds: float) -> str:
    """An estimate of seconds: `4 s` where `for_people` writes `4.2 s`."""
    return f"{max(0.0, seconds):.0f} s" if seconds < 10 else for_people(seconds)


def counted(count: int, what: str) -> str:
    """A number of things: `no workers`, `1 worker`, `2 workers`."""
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def size(nbytes: float) -> str:
    """Bytes: `1.5 GB`, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} bytes"


def as_text(value: Any) -> str:
    """A prompt or a completion: text as it is, messages as `[role] content`, anything else as Python writes it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
        return "\n".join(_message(item) for item in value)
    return repr(value)


def _message(message: dict[str, Any]) -> str:
    name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
    lines = [f"[{message['role']}{name}] {_content(message.get('content'))}".rstrip(" ")]
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, dict) else call
        if not isinstance(function, dict):
            lines.append(f"  → {function!r}")
            continue
        arguments = function.get("arguments", "")
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        lines.append(f"  → {function.get('name', '?')}({shown})")
    return "\n".join(lines)


def _content(content: Any) -> str:
    """Text, or the text parts of a list of parts; other parts by their type, e.g. `<image>`."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    parts = [part if isinstance(part, dict) else {"text": part} for part in content]
    return "".join(str(part["text"]) if part.get("text") is not None else f"<{part.get('type')}>" for part in parts)


def printable(text: str) -> str:
    """Text that is safe to show on a terminal or a page: control and formatting characters become escapes.

    Spaces of every width, and the joiners that emoji and several scripts need, stay.
    """
    if text.isascii() and text.replace("\n", "").isprintable():
        return text
    return "".join(char if _is_harmless(char) else repr(char)[1:-1] for char in text)


def one_line(text: str, most: int = 80) -> str:
    """Text from outside for a line of a log: without line ends, and cut."""
    escaped = printable(text).replace("\n", r"\n").replace("\t", r"\t")
    return escaped if len(escaped) <= most else f"{escaped[: most - 1]}…"


def encodable(text: str) -> str:
    """Text without lone surrogates, which JSON can write and no tokenizer takes."""
    return text.encode("utf-8", "replace").decode()


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in "\t\n\u200c\u200d" or category(char) == "Zs"
