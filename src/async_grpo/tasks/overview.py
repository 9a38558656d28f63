"""What is in files, before all of their cells are read: the rows of each task, and prompts that are in two sets."""

from __future__ import annotations

import json
from collections.abc import Iterator

from async_grpo.tasks.data import no_rows, opened
from async_grpo.tasks.files import Files, files_by_task


def count_rows(files: Files) -> dict[str, int]:
    """Count the rows of each task, by what the files say of themselves.

    Raises:
        UsageError: a file cannot be used, or a task has no rows.
    """
    counts = {}
    for task, paths in files_by_task(files).items():
        counts[task] = 0
        for path in paths:
            with opened(path) as file:
                counts[task] += file.metadata.num_rows
        if not counts[task]:
            raise no_rows(task, paths)
    return counts


def seen_in_training(training: Files, held_out: Files) -> list[str]:
    """Rows of `held_out` whose prompt is in `training`, as `a.parquet, row 1`."""
    known = {prompt for _, prompt in _prompts(training)}
    return [place for place, prompt in _prompts(held_out) if prompt in known]


def _prompts(files: Files) -> Iterator[tuple[str, str]]:
    for paths in files_by_task(files).values():
        for path in paths:
            number = 0
            with opened(path) as file:
                for batch in file.iter_batches(1024, columns=["prompt"]):
                    for prompt in batch.column("prompt").to_pylist():
                        number += 1
                        yield f"{path.name}, row {number:,}", _text(prompt)


def _text(prompt: object) -> str:
    """As text: messages with one turn of the user are the text of that turn."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], dict):
        prompt = prompt[0].get("content")
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=repr)
