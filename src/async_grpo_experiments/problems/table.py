"""The sets by name. Those of the hub may be read from a path, with the same columns.

problems = load("GSM8K", split="train")
GRPOTrainer(train_dataset=Dataset.from_list(problems.rows), reward_funcs=problems.reward, …)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from async_grpo.errors import UsageError
from async_grpo.rewards import final_number

BOXED = "Reason step by step, and put the final answer within \\boxed{}."
Reward = Callable[..., list[float]]


@dataclass(frozen=True, slots=True)
class ProblemSet:
    """Rows with a column `prompt`, and what rewards an answer."""

    rows: list[dict[str, Any]]
    reward: Reward | None  # the reward function; None: a reward model scores afterwards
    verified: bool  # whether the reward is 1 for what is right and 0 for all else


class _Hub(NamedTuple):
    """Where a set is on the hub, and which of its columns are the prompt and the answer."""

    name: str
    config: str | None
    prompt: str
    answer: str | None
    ask: str = ""  # behind the prompt
    reward: Reward | None = None


_HUB = {
    "GSM8K": _Hub("openai/gsm8k", "main", "question", "answer", BOXED, final_number),
    "MATH": _Hub("DigitalLearningGmbH/MATH-lighteval", None, "problem", "solution", BOXED, final_number),
    "AIME": _Hub("HuggingFaceH4/aime_2024", None, "problem", "answer", BOXED, final_number),
    "TLDR": _Hub("trl-lib/tldr", None, "prompt", None),
}


def load(
    name: str,
    *,
    path: str | Path | None = None,
    split: str = "train",
    max_examples: int | None = None,
    chat: bool = False,
    **made: Any,
) -> ProblemSet:
    """The problems of one name in `NAMES`.

    Args:
        path: a file of rows (`.jsonl`, `.json`, `.parquet`), a folder that `save_to_disk` wrote, or another name of the
            hub; None: the set's own.
        max_examples: the first so many.
        chat: prompts are messages.
        made: of a set that is made here, such as `branches`, `length` and `seed`.

    Raises:
        UsageError: there is no set of this name, it has no rows, or it is not made by such keys.
    """
    if name in _HUB:
        if made:
            raise UsageError(f"{name} takes no {', '.join(made)}: it is read, not made.")
        problems = _of_hub(_HUB[name], path, split, max_examples)
    elif name in _MADE and path is None:
        problems = _made(name, 1_000 if max_examples is None else max_examples, made)
    else:
        why = "is made here, and takes no path" if name in _MADE else "is not the name of a set of problems"
        raise UsageError(f"{name} {why}. The names are {', '.join(NAMES)}.")
    if not problems.rows:
        raise UsageError(f"{name} has no rows in {path or 'its'} {split}.")
    if not chat:
        return problems
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in problems.rows]
    return replace(problems, rows=rows)


def _made(name: str, count: int, keys: Mapping[str, Any]) -> ProblemSet:
    make = _MADE[name]
    known = [key.name for key in signature(make).parameters.values() if key.kind is Parameter.KEYWORD_ONLY]
    if unknown := [key for key in keys if key not in known]:
        raise UsageError(f"{name} is not made by {', '.join(unknown)}. Its keys are {', '.join(known)}.")
    return make(count, **keys)


def _of_hub(source: _Hub, path: str | Path | None, split: str, most: int | None) -> ProblemSet:
    rows = []
    for row in islice(_read(source, path, split), most):
        prompt = "\n".join([str(row[source.prompt]), *([source.ask] if source.ask else [])])
        rows.append({"prompt": prompt} | ({"answer": str(row[source.answer])} if source.answer else {}))
    return ProblemSet(rows, source.reward, verified=source.reward is final_number)


def _read(source: _Hub, path: str | Path | None, split: str) -> Iterable[Mapping[str, Any]]:
    from datasets import DatasetDict, load_dataset, load_from_disk

    from async_grpo.tasks.unpacked import require_small

    if path is None:
        found = load_dataset(source.name, source.config, split=split)
    elif Path(path).is_dir():
        found = load_from_disk(str(path))
        found = found[split] if isinstance(found, DatasetDict) else found
    elif Path(path).is_file():
        kind = {".jsonl": "json"}.get(Path(path).suffix, Path(path).suffix.removeprefix("."))
        try:
            if kind == "parquet":
                require_small(Path(path))
            found = load_dataset(kind, data_files=str(path), split="train")
        except ValueError as error:  # it is empty, or of another kind
            raise UsageError(f"{path} has no rows that can be read: {error}") from error
    else:
        found = load_dataset(str(path), split=split)
    if missing := [name for name in (source.prompt, source.answer) if name and name not in found.column_names]:
        raise UsageError(f"{path or source.name} has no column {missing[0]!r}, but {', '.join(found.column_names)}.")
    return found


def _sums(count: int, *, below: int = 50, seed: int = 0) -> ProblemSet:
    """Sums in fixed width, `07+41=` and `048`: those of the demo."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(below), draw.randrange(below)
        rows.append({"prompt": f"{a:02d}+{b:02d}=", "answer": f"{a + b:03d}"})
    return ProblemSet(rows, exactly, verified=True)


def exactly(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for exactly the answer."""
    return [float(found.strip() == right) for found, right in zip(completions, answer, strict=True)]


def _star(count: int, *, branches: int = 3, length: int = 3, nodes: int = 12, seed: int = 0) -> ProblemSet:
    from async_grpo_experiments.worlds import star as worlds

    graphs = [*worlds.star_graphs(branches, length, count, nodes=nodes, seed=seed)]
    return ProblemSet(worlds.star_rows(graphs), worlds.star_reward, verified=True)


def _sentiment(count: int, *, seed: int = 1) -> ProblemSet:
    from async_grpo_experiments.worlds import sentiment as worlds

    return ProblemSet(worlds.sentiment_rows(count, seed=seed), worlds.sentiment_reward, verified=False)


def _ascents(count: int, *, graded: bool = False) -> ProblemSet:
    """A letter as prompt; rewarded are letters that follow their predecessor. A reference says five of `a` to `h`."""
    from async_grpo_experiments.worlds import enumerable as worlds

    reward = worlds.graded_ascents_of_letters if graded else worlds.ascents_of_letters
    return ProblemSet(worlds.letters_rows(count), reward, verified=not graded)


_Make = Callable[..., ProblemSet]
_MADE: dict[str, _Make] = {"sums": _sums, "star": _star, "sentiment": _sentiment, "ascents": _ascents}
ON_HUB = tuple(_HUB)
NAMES = (*_HUB, *_MADE)


SCORED = (*(name for name, source in _HUB.items() if source.reward is None), "sentiment")
"""Sets whose answers a reward model may score: the others are right or wrong."""


def has_reward(name: str) -> bool:
    """Whether a function rewards the answers of a set, and not only a reward model."""
    return name not in _HUB or _HUB[name].reward is not None
