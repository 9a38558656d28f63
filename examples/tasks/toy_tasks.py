"""Three small tasks in the form of verl's parquet files: sums, sorting and comparing of digits."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 300  # of each task, the last 50 of them held out
HELD_OUT = 50


def sums(draw: random.Random) -> tuple[str, str]:
    one, two = draw.randint(0, 4), draw.randint(0, 5)
    return f"{one}+{two}=", str(one + two)


def sorting(draw: random.Random) -> tuple[str, str]:
    digits = draw.sample("123", 3)
    return f"sort {''.join(digits)}:", "".join(sorted(digits))


def comparing(draw: random.Random) -> tuple[str, str]:
    one, two = draw.sample("0123456789", 2)
    return f"more {one} or {two}?", max(one, two)


TASKS: dict[str, Callable[[random.Random], tuple[str, str]]] = {
    "sums": sums,
    "sorting": sorting,
    "comparing": comparing,
}


def rows_of(task: str) -> list[dict]:
    draw = random.Random(task)
    asked = [TASKS[task](draw) for _ in range(ROWS)]
    return [
        {
            "data_source": f"toy__{task}",
            "prompt": question,
            "ability": task,
            "reward_model": json.dumps({"style": "rule", "ground_truth": answer}),
            "extra_info": json.dumps({"split": "train", "index": index}),
        }
        for index, (question, answer) in enumerate(asked)
    ]


def write(folder: Path, *tasks: str) -> tuple[dict[str, Path], dict[str, Path]]:
    """Write the files of these tasks, unless they are there. Returns those to train and to evaluate on."""
    folder.mkdir(parents=True, exist_ok=True)
    files: tuple[dict[str, Path], dict[str, Path]] = ({}, {})
    for task in tasks:
        rows = rows_of(task)
        for by_task, part, name in zip(files, (rows[:-HELD_OUT], rows[-HELD_OUT:]), ("train", "test"), strict=True):
            by_task[task] = folder / f"{task}__{name}.parquet"
            if not by_task[task].exists():  # several processes of a run do this at once
                whole = folder / f".{uuid4().hex}"
                pq.write_table(pa.Table.from_pylist(part), whole)
                whole.replace(by_task[task])
    return files
