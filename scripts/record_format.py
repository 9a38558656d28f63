"""The tables of the record format in docs/queue.md, made from the fields in `async_grpo.records`.

    python scripts/record_format.py [--write]

Prints the tables; with --write, puts them into the page.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from async_grpo.records import OLDEST_FORMAT, Job, RolloutGroup, Stored, Timings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "queue.md"
BEGIN, END = "<!-- record format -->\n", "<!-- end of record format -->\n"
DIMENSIONS = """\
P tokens of the prompt, G completions, N tokens of all completions, F reward functions, T turns of
all completions, K bytes. What is stored in `texts` is JSON in a tensor of that name, outside the
header.

Since format 4 a job or a group may have images anywhere in its JSON. There it has `null` in their
places. Their bytes are in a tensor `images` (`uint8`), each image once. A tensor `image_table` has
JSON: `sizes`, the bytes of each image, and `places`, a list of `[image, key, key, …]`, of which the
first key is `header` or `texts`.

In the same way it may have dates, times, durations, decimals and bytes, which are JSON in their
places: the text that `isoformat()` gives (with `[Europe/Berlin]` behind it where the time zone has
a name), a number of microseconds, the text of a decimal, base64. A tensor `typed_table` has JSON
with `places`, a list of `[type, key, key, …]`; the types are `date`, `datetime`, `time`,
`timedelta`, `Decimal`, `bytes`, and `pandas.Timestamp` and `pandas.Timedelta` (in nanoseconds),
which are what a column of nanoseconds holds.
"""


def tables() -> str:
    parts = [
        table("A job", Job),
        table("A finished group", RolloutGroup),
        DIMENSIONS,
        table("Its timings", Timings),
    ]
    return "\n".join(["", *parts, ""])


def table(title: str, record: type) -> str:
    head = [f"### {title}", "", f"| `{record.__name__}` | stored as | meaning |", "|---|---|---|"]
    return "\n".join([*head, *(line(field) for field in fields(record)), ""])


def line(field: Field[Any]) -> str:
    about: Stored = field.metadata["stored"]
    return f"| `{field.name}` | {stored_as(about)} | {about.meaning}{remarks(field, about)} |"


def stored_as(about: Stored) -> str:
    if about.section == "tensor":
        return f"`{about.kind}[{', '.join(about.shape)}]`"
    kind = about.kind if isinstance(about.kind, str) else f"`{about.kind.__name__}`"
    return f"{kind}, in `texts`" if about.section == "texts" else kind


def remarks(field: Field[Any], about: Stored) -> str:
    said = []
    if about.choices:
        said.append("one of " + ", ".join(f"`{choice}`" for choice in about.choices))
    if about.least is not None:
        said.append(f"{about.least} or 1" if about.most == 1 else f"at least {about.least}")
    if field.default is None:
        said.append("may be absent")
    if about.since > OLDEST_FORMAT:
        default = field.default if field.default_factory is MISSING else field.default_factory()
        said.append(f"since format {about.since}" + ("" if default is None else f", before it `{default!r}`"))
    return "".join(f"; {remark}" for remark in said)


def page_with_tables(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tables() + END + after


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page_with_tables(PAGE.read_text()))
    else:
        print(tables())
