"""One self-contained page of rollouts: `rollouts_page.html` with the data in it.

What a model wrote is hostile input. It is in the page as JSON in ASCII without `<`, `>` and `&`, so that nothing in it
can end the element that holds it, and the script only ever makes text nodes of it. A Content-Security-Policy allows the
page's own style and script, by their hashes, and images that are in the page; nothing else: no request, no form, no
other script. Images are those formats of pixels that browsers decode; none that has text or references (SVG).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from base64 import b64encode
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any
from uuid import uuid4

from async_grpo.archive.groups import FinishedGroup, FinishedGroups
from async_grpo.errors import BadFileError, UsageError
from async_grpo.formatting import as_text, printable
from async_grpo.images import encoded_in
from async_grpo.reports.rollouts import Rollout, Selection, row_of
from async_grpo.rundir.reading import open_plain

MARK = "<!doctype html><!-- async-grpo rollouts -->"
_CHARACTERS = 20_000  # of one text; what is beyond is in the archive
_PAGE_CHARACTERS = 64_000_000  # of all texts: a browser still opens it
_IMAGE_BYTES = 2_000_000  # larger images are named only
_TYPES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}  # by how their files begin


def write_page(path: Path, groups: FinishedGroups, selection: Selection) -> int:
    """Write the page, in place of an older one; returns its size in bytes.

    Raises:
        UsageError: the file exists and is not a page of rollouts, or cannot be written.
    """
    page = page_of(groups, selection).encode()
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        if path.exists() and not _is_page(path):
            raise UsageError(f"{path} exists and is not a page of rollouts: choose another file. Nothing was changed.")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(page)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
    return len(page)


def page_of(groups: FinishedGroups, selection: Selection) -> str:
    template = resources.files("async_grpo.reports").joinpath("rollouts_page.html").read_text()
    style, script = _inner(template, "style"), _inner(template, "script")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return template.replace("{{policy}}", policy).replace("{{data}}", _as_element(_data(groups, selection)))


def _inner(template: str, element: str) -> str:
    found = re.search(rf"<{element}>(.*?)</{element}>", template, re.DOTALL)
    assert found is not None
    return found[1]


def _hash(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _as_element(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element: ASCII, and no character that markup is made of."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(groups: FinishedGroups, selection: Selection) -> dict[str, Any]:
    """Groups once, and their completions as rows: [group, total, advantage, tokens, text, extras, images, rewards…]."""
    names = list(dict.fromkeys(name for it in selection.rollouts for name in it.found.group.reward_names))
    numbers: dict[tuple[int, int], int] = {}
    about: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    dialogues: dict[int, list[list[Any]]] = {}  # by row
    left = _PAGE_CHARACTERS
    for rollout in selection.rollouts:
        key = (rollout.found.group.job.seq, rollout.found.group.attempt)
        if key not in numbers:
            numbers[key] = len(about)
            about.append(_group(rollout.found))
            left -= len(about[-1]["prompt"]) + sum(map(len, about[-1]["images"]))
        rows.append([numbers[key], *_row(rollout, names)])
        left -= len(rows[-1][4]) + sum(map(len, rows[-1][6]))
        if parts := _dialogue(rollout):
            dialogues[len(rows) - 1] = parts
            left -= sum(len(part[1]) for part in parts)
        if left < 0:
            break
    state = groups.state
    return {
        "run": {"id": state.run_id, "state": groups.condition(), "directory": str(groups.run.root)},
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "newestOnly": selection.more or len(rows) < len(selection.rollouts),
        "skipped": len(groups.skipped),
        "rewards": [printable(name) for name in names],
        "groups": about,
        "rows": rows,
        "dialogues": dialogues,
    }


def _group(found: FinishedGroup) -> dict[str, Any]:
    group, fate = found.group, found.fate
    row = row_of(group)
    prompt = row.get("prompt", row)
    others = {name: value for name, value in row.items() if name != "prompt"} if "prompt" in row else {}
    return {
        "seq": group.job.seq,
        "state": fate.state,
        "step": fate.step,
        "staleness": found.staleness,
        "version": group.policy_version,
        "worker": group.worker,
        "attempt": group.attempt,
        "dropped": printable(fate.reason) if fate.reason else None,
        "prompt": _text(prompt),
        "columns": _columns(others.items()),
        "images": _images(row),
        "seconds": [round(group.timings.generate_s, 3), round(group.timings.score_s, 3)],
    }


def _row(rollout: Rollout, names: list[str]) -> list[Any]:
    rewards = rollout.rewards
    return [
        _number(rollout.total),
        _number(rollout.advantage),
        rollout.length,
        _text(rollout.found.group.completions[rollout.index]),
        _columns(rollout.columns),
        _images([*(value for _, value in rollout.columns), rollout.found.group.completions[rollout.index]]),
        *(_number(rewards.get(name)) for name in names),
    ]


def _dialogue(rollout: Rollout) -> list[list[Any]]:
    """Its messages: [role, text, reward of the turn, 1 or -1 where that is more or less than the mean of the group's].

    Empty where no tool has written.
    """
    group = rollout.found.group
    messages = group.completions[rollout.index]
    if not isinstance(messages, list) or not any(message.get("role") == "tool" for message in messages):
        return []
    known = [reward for row in group.rewards_of_turns() for reward in row if not math.isnan(reward)]
    usual, rewards, parts = sum(known) / max(1, len(known)), iter(rollout.turn_rewards), []
    for message in messages:
        reward = _number(next(rewards, math.nan)) if message.get("role") == "assistant" else None
        side = 0 if reward is None else int(reward > usual) - int(reward < usual)
        parts.append([printable(str(message.get("role"))), _text([message]), reward, side])
    return parts


def _columns(values: Iterable[tuple[str, Any]]) -> list[list[str]]:
    return [[printable(str(name)), _text(value)] for name, value in values]


def _images(value: Any) -> list[str]:
    """The images in `value` that a page can show, as `data:` URIs."""
    found = [image.data for image in encoded_in(value) if len(image.data) <= _IMAGE_BYTES]
    types = [next((kind for start, kind in _TYPES.items() if data.startswith(start)), None) for data in found]
    return [
        f"data:image/{kind};base64,{b64encode(data).decode()}" for kind, data in zip(types, found, strict=True) if kind
    ]


def _text(value: Any) -> str:
    text = as_text(value)
    left = len(text) - _CHARACTERS
    return printable(text[:_CHARACTERS]) + (f"\n… {left:,} more characters" if left > 0 else "")


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _is_page(path: Path) -> bool:
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            return file.read(len(MARK)) == MARK.encode()
    except BadFileError:
        return False
