"""Rows of several tasks, from parquet files in the form of verl's recipes, and which of them are used.

Nothing is repaired: a cell that cannot be used is an error with its file, row and column. Text is read as JSON or as a
Python literal, and never evaluated.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, concatenate_datasets
from datasets.fingerprint import generate_random_fingerprint

from async_grpo.errors import UsageError
from async_grpo.tasks.task_files import LARGEST, Files, cut, files_by_task
from async_grpo.tasks.unpacked import require_small

REQUIRED = ("data_source", "prompt", "reward_model")
OPTIONAL = ("ability", "extra_info", "apply_chat_template")
_AS_JSON = json.JSONEncoder(allow_nan=False).encode
_TWO_HALVES = re.compile("[\ud800-\udbff][\udc00-\udfff]")  # which JSON reads as one
_PROMPTS_AT_ONCE = 1000  # that a tokenizer gets
_AT_ONCE = 256  # rows that are Python's, so few that they die young; the others are columns of Arrow

first_seen: dict[str, str] = {}
"""By data source, the first row that `load` found it in: `a.parquet, row 1`. For what refuses a source later."""
_STRING = r"Q(?!QQ)[^\\Q\r\n]*+(?:\\.[^\\Q\r\n]*+)*+Q | QQQ[^\\Q]*+(?:(?:\\.|Q(?!QQ))[^\\Q]*+)*+QQQ"
_STRINGS = " | ".join(_STRING.replace("Q", quote) for quote in ("'", '"'))
_WITHOUT_F_STRINGS = re.compile(  # of which Python reads the fields in a time that grows as the square of their number
    rf"""(?: [bru]{{0,2}} (?: {_STRINGS} ) | \w++ (?!['"]) | \#[^\r\n]*+ | [^\w'"\#]++ )*+""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def load(files: Files, *, separate: bool = False, tokenizer: Any = None) -> Any:
    """Read the rows of all tasks.

    Args:
        files: a path, a list, or `{task: path or list}`, or one of these as text in YAML, JSON or Python. In a list,
            the name of a file has its task: `math__combined_54.4k.parquet` is of `math`.
        separate: return a dictionary with a dataset for each task, as `eval_dataset` takes it.
        tokenizer: its chat template makes a text of each prompt that is messages.

    Returns:
        A dataset with the columns `prompt`, `task`, `data_source` and `ability`, and `ground_truth` and `extra_info` as
        JSON.

    Raises:
        UsageError: a file, a column or a cell cannot be used, a task has no rows, or some prompts are messages and
            others are text, and there is no tokenizer.
    """
    forms: dict[str, str] = {}  # by form of prompts, the first row that has it
    tasks = {}
    for task, paths in files_by_task(files).items():
        tasks[task] = _of_task(task, paths, tokenizer, {} if separate else forms)
    return tasks if separate else concatenate_datasets(list(tasks.values()))


def _of_task(task: str, paths: Sequence[Path], tokenizer: Any, forms: dict[str, str]) -> Dataset:
    rows = (row for path in paths for row in _rows(path, task, tokenizer, forms))
    parts = [pa.Table.from_pylist(part) for part in iter(lambda: [*islice(rows, _AT_ONCE)], [])]
    if not parts:
        raise UsageError(f"task {task!r} has no rows ({', '.join(path.name for path in paths)})")
    return Dataset(pa.concat_tables(parts), fingerprint=generate_random_fingerprint())  # else it copies all to hash it


def _rows(path: Path, task: str, tokenizer: Any, forms: dict[str, str]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(_cells(path), start=1):
        where = f"{path.name}, row {number:,}"
        prompt = _prompt(row, where, tokenizer)
        form = "text" if isinstance(prompt, str) else "messages"
        other = next((first for known, first in forms.items() if known != form), None)
        if other is not None:
            raise UsageError(
                f"The prompt of {where} is {form}, and that of {other} is not: one column cannot hold both. Give "
                "load(…, tokenizer=…), which makes a text of each."
            )
        forms.setdefault(form, where)
        source = _text(row, "data_source", where)
        first_seen.setdefault(source, where)
        graded = _structure(row["reward_model"], "reward_model", where)
        if not isinstance(graded, dict) or graded.get("ground_truth") is None:
            raise UsageError(f"{where}: ground_truth is missing")
        yield {
            "prompt": prompt,
            "task": task,
            "data_source": source,
            "ability": "" if row.get("ability") is None else _text(row, "ability", where),
            "ground_truth": _json(graded["ground_truth"], "ground_truth", where),
            "extra_info": _json(_structure(row.get("extra_info"), "extra_info", where), "extra_info", where),
        }


def _cells(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            missing = [name for name in REQUIRED if name not in names]
            if missing:
                needed = ", ".join(REQUIRED)
                raise UsageError(f"{path.name} has no column {', '.join(missing)}. It needs {needed}.")
            columns = [name for name in (*REQUIRED, *OPTIONAL) if name in names]
            require_small(path, columns)
            for batch in file.iter_batches(_AT_ONCE, columns=columns):
                yield from batch.to_pylist()
    except FileNotFoundError:
        raise UsageError(f"There is no file {path}.") from None
    except (pa.ArrowException, OSError) as error:
        raise UsageError(f"{path.name} cannot be read as parquet: {cut(str(error))}") from None


def _prompt(row: Mapping[str, Any], where: str, tokenizer: Any) -> str | list[dict[str, str]]:
    """Text, or messages of `role` and `content`, by `apply_chat_template` where the row has it."""
    given, templated = row["prompt"], row.get("apply_chat_template")
    if templated not in (None, True, False):
        raise UsageError(f"{where}: apply_chat_template is neither true nor false: {cut(repr(templated))}")
    if isinstance(given, str) and given.strip():
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list) and given and all(map(_is_message, given)):
        messages = [{"role": message["role"], "content": message["content"]} for message in given]
    else:
        raise UsageError(f"{where}: prompt is neither a text nor a list of messages: {cut(repr(given))}")
    if templated is False or (templated is None and isinstance(given, str)):
        if len(messages) > 1:
            raise UsageError(f"{where}: apply_chat_template is false, and prompt has {len(messages)} messages, not 1")
        return messages[0]["content"]
    if tokenizer is None:
        return messages
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _is_message(message: Any) -> bool:
    known = ("role", "content")
    return (
        isinstance(message, dict)
        and all(isinstance(message.get(name), str) for name in known)
        and all(value is None for name, value in message.items() if name not in known)
    )


def _text(row: Mapping[str, Any], column: str, where: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: {column} is no text: {cut(repr(value))}")
    return value


def _structure(cell: Any, column: str, where: str) -> Any:
    """A cell as it is, or what its text says in JSON or as a Python literal."""
    if not isinstance(cell, str):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        pass
    try:
        return literal_of(cell)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise UsageError(
            f"{where}: {column} is neither JSON nor a Python literal (at most {LARGEST:,} characters, no f-strings and "
            f'sets, keys that are texts): "{cut(cell)}"'
        ) from None


def _json(value: Any, column: str, where: str) -> str:
    """As text that says exactly the same. A tuple becomes a list."""
    try:
        text = _AS_JSON(value)
        if not _is_read_back(value):
            raise ValueError("a key that is no text, or halves of a character")
    except (ValueError, TypeError, RecursionError) as error:
        raise UsageError(f"{where}: {column} holds what JSON has not ({cut(str(error))})") from None
    return text


def _is_read_back(value: Any) -> bool:
    if isinstance(value, str):
        return not _TWO_HALVES.search(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_read_back(key) and _is_read_back(one) for key, one in value.items())
    return not isinstance(value, (list, tuple)) or all(map(_is_read_back, value))


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
    for start in range(0, len(prompts), _PROMPTS_AT_ONCE):
        some = prompts[start : start + _PROMPTS_AT_ONCE]
        if isinstance(some[0], str):
            read = tokenizer(list(some))["input_ids"]
        else:
            texts = tokenizer.apply_chat_template(list(some), tokenize=False, add_generation_prompt=True)
            read = tokenizer(texts, add_special_tokens=False)["input_ids"]
        yield from map(len, read)


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
