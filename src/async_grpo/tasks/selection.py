"""Which rows of what `load` gave are used: those whose prompt is short enough, or as many as are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from datasets import Dataset

from async_grpo.errors import UsageError

_AT_ONCE = 1000  # prompts that a tokenizer gets


def within(dataset: Dataset, tokenizer: Any, tokens: int, *, drop: bool = False) -> Dataset:
    """Check that no prompt is longer than `tokens`, or `drop` the rows of longer ones and print how many there were.

    Raises:
        UsageError: one is longer, or all are and would be left out.
    """
    fitting = []
    for row, length in enumerate(_lengths(dataset["prompt"], tokenizer)):
        if length <= tokens:
            fitting.append(row)
        elif not drop:
            source = dataset[row]["data_source"]
            raise UsageError(
                f"The prompt of row {row + 1:,} of the data ({source}) has {length:,} tokens, and at most {tokens:,} "
                "are allowed (data.max_prompt_length). Raise it, or leave such rows out: "
                "data.filter_overlong_prompts=true, here drop=True."
            )
    if not fitting:
        raise UsageError(f"Every prompt has over {tokens:,} tokens (data.max_prompt_length). Raise it.")
    if len(fitting) == len(dataset):
        return dataset
    print(f"{len(dataset) - len(fitting):,} of {len(dataset):,} rows have over {tokens:,} tokens, and are left out")
    return dataset.select(fitting)


def sampled(tasks: Mapping[str, Dataset], rows: int, *, seed: int) -> dict[str, Dataset]:
    """Draw `rows` of all tasks, of each its share and at least one; the same seed draws the same."""
    total = sum(map(len, tasks.values()))
    if total <= rows:
        return dict(tasks)
    return {task: own.shuffle(seed=seed).select(range(max(1, rows * len(own) // total))) for task, own in tasks.items()}


def _lengths(prompts: Sequence[Any], tokenizer: Any) -> Iterator[int]:
    for start in range(0, len(prompts), _AT_ONCE):
        some = prompts[start : start + _AT_ONCE]
        if isinstance(some[0], str):
            read = tokenizer(list(some))["input_ids"]
        else:
            texts = tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=True)
            read = tokenizer(texts, add_special_tokens=False)["input_ids"]
        yield from map(len, read)
