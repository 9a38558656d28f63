"""One reward function for rows of several sources: each row is rewarded by what its `data_source` begins with."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.rewards.answers import final_answer, text_of
from async_grpo.tasks import rules
from async_grpo.tasks.data import first_seen

URL = "STEM_LLM_JUDGE_URL"
TIMEOUT_S = 60.0  # for one request
LARGEST = 1 << 20  # bytes of an answer
SHOWN = 8_000  # characters of a completion without a marked answer
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
ASKED = (
    "A question, its right answer, and a student's answer follow. Does the student's answer say the same as the right "
    "answer? Judge only that; do not answer the question. End with one word: Yes or No.\n\n"
    "Question: {question}\n\nRight answer: {right}\n\nStudent's answer: {given}"
)
Reward = Callable[..., Sequence[float | None]]


class JudgeError(AsyncGRPOError):
    """The judge gave no verdict. The group is tried again, and is never paid 0 for it."""

    exit_code = 1


def judged(
    completions: Sequence[Any], ground_truth: Sequence[Any], prompts: Sequence[Any] = (), **_: Any
) -> list[float]:
    """1 where the judge says Yes, 0 where it says No.

    Raises:
        JudgeError: it cannot be reached within `TIMEOUT_S`, or its answer is no verdict.
    """
    if not completions:
        return []
    model = _asked("/v1/models")["data"][0]["id"]
    rows = zip(prompts or [""] * len(completions), completions, ground_truth, strict=True)
    return [_verdict(model, text_of(question), text_of(one), right) for question, one, right in rows]


def _require() -> None:
    if not os.environ.get(URL):
        raise UsageError(f"Rows of stem_web are rewarded by a judge: set {URL} to a server with OpenAI's API.")


judged.require = _require  # type: ignore[attr-defined]
judged.thread_safe = True  # type: ignore[attr-defined]


def _verdict(model: str, question: str, text: str, right: Any) -> float:
    given = final_answer(text) or text[-SHOWN:]
    asked = ASKED.format(question=question, right=right, given=given)
    body = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": 0.0}
    said = str(_asked("/v1/chat/completions", body)["choices"][0]["message"]["content"])
    verdicts = _VERDICT.findall(said)
    if not verdicts:
        raise JudgeError(f"The judge at {URL} answered neither Yes nor No: {said[-60:]!r}")
    return float(verdicts[-1].lower() == "yes")


def _asked(path: str, body: dict[str, Any] | None = None) -> Any:
    _require()
    url = os.environ[URL].rstrip("/").removesuffix("/v1") + path
    request = Request(url, None if body is None else json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=TIMEOUT_S) as answer:
            found = json.loads(answer.read(LARGEST))
        _ = found["data"][0]["id"] if body is None else found["choices"][0]["message"]["content"]
        return found
    except (URLError, OSError, ValueError) as error:
        raise JudgeError(f"The judge at {URL} cannot be asked: {error}. The group is tried again.") from None
    except (KeyError, IndexError, TypeError):
        raise JudgeError(f"What the judge at {URL} answers is not OpenAI's API.") from None


BUILT_IN: dict[str, Reward] = {
    "math": rules.math,
    "codegen": rules.codegen,
    "logic__zebra": rules.by_rule(rules.zebra, rules.cells_truth),
    "logic__ordering": rules.by_rule(rules.ordering, rules.names_truth),
    "logic__graph": rules.by_rule(rules.same_text, rules.text_truth),
    "simulation": rules.by_rule(rules.same_data, rules.data_truth),
    "table": rules.by_rule(rules.same_text, rules.text_truth),
    "stem": rules.by_rule(rules.same_text, rules.text_truth),
    "stem_web": judged,
}


class Score:
    """A reward function for TRL. It pays what the reward of the longest matching prefix pays, and nothing else.

    Args:
        rewards: by prefix of `data_source`, a reward function. It gets the completions of its rows, and the columns of
            the dataset, with `ground_truth` and `extra_info` as values.
    """

    __name__ = "score"
    success_threshold = 1.0

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards = dict(sorted(rewards.items()))
        self.thread_safe = all(getattr(one, "thread_safe", False) for one in rewards.values())
        self.joint = all(getattr(one, "joint", True) for one in rewards.values())

    def using(self, rewards: Mapping[str, Reward]) -> Score:
        """Return a reward function with these prefixes added, or replaced.

        Raises:
            UsageError: one of them is no function, or an asynchronous one.
        """
        for prefix, one in rewards.items():
            if not callable(one) or iscoroutinefunction(one):
                raise UsageError(f"The reward of {prefix!r} must be a function that is not asynchronous, got {one!r}.")
        return Score({**self._rewards, **rewards})

    def __call__(
        self, completions: Sequence[Any], data_source: Sequence[str], ground_truth: Sequence[str], **columns: Any
    ) -> list[float | None]:
        rewards: list[float | None] = [None] * len(completions)
        columns |= {"completions": completions, "data_source": data_source, "ground_truth": _values(ground_truth)}
        if "extra_info" in columns:
            columns["extra_info"] = _values(columns["extra_info"])
        indices: dict[str, list[int]] = {}
        for index, source in enumerate(data_source):
            indices.setdefault(self.prefix_of(source), []).append(index)
        for prefix, own in indices.items():
            given = self._rewards[prefix](**{name: _own(value, own, len(rewards)) for name, value in columns.items()})
            for index, reward in zip(own, given, strict=True):
                rewards[index] = reward
        return rewards

    def prefix_of(self, source: str) -> str:
        """The longest prefix that has a reward for this source.

        Raises:
            UsageError: there is none.
        """
        fitting = [prefix for prefix in self._rewards if source.startswith(prefix)]
        if fitting:
            return max(fitting, key=len)
        where = f" ({first_seen[source]})" if source in first_seen else ""
        raise UsageError(
            f"No reward for data_source {source!r}{where}. There are: {', '.join(self._rewards)}; add one with "
            f'score.using({{"{source.partition("__")[0]}": f}})'
        )

    def require_rows(self, *datasets: Any) -> set[str]:
        """The prefixes whose rewards these rows need.

        Args:
            datasets: with the columns of `load`, or dictionaries of them; others are left out.

        Raises:
            UsageError: a source has no reward, or its reward cannot read the ground truth of a row.
        """
        found: set[str] = set()
        for rows in _of_load(datasets):
            of_source = {source: self.prefix_of(source) for source in sorted(rows.unique("data_source"))}
            readers = {source: getattr(self._rewards[prefix], "reads", None) for source, prefix in of_source.items()}
            pairs = zip(rows["data_source"][:], rows["ground_truth"][:], strict=True)  # whole columns, which is quick
            for number, (source, text) in enumerate(pairs, start=1):
                try:
                    if (reads := readers[source]) is not None:
                        reads(json.loads(text))
                except ValueError as error:
                    where = f"data_source {source!r}, which begins at {first_seen.get(source, 'row 1')}"
                    raise UsageError(f"Row {number:,} of a dataset cannot be rewarded: {error} ({where}).") from None
            found |= {*of_source.values()}
        return found

    def require_for(self, *datasets: Any) -> None:
        """Refuse, before anything is generated, rows that could not be rewarded on this machine.

        Raises:
            UsageError: a row cannot be rewarded, or what its reward needs is not set.
            SandboxError: programs of models may not run, or cannot be isolated here.
        """
        for prefix in sorted(self.require_rows(*datasets)):
            require = getattr(self._rewards[prefix], "require", None)
            if callable(require):
                require()


score = Score(BUILT_IN)


def _values(texts: Sequence[str]) -> list[Any]:
    return [json.loads(text) for text in texts]


def _own(value: Any, indices: Sequence[int], rows: int) -> Any:
    return [value[index] for index in indices] if isinstance(value, (list, tuple)) and len(value) == rows else value


def _of_load(datasets: Iterable[Any]) -> list[Any]:
    flat = [one for given in datasets for one in (given.values() if isinstance(given, dict) else [given])]
    return [
        one
        for one in flat
        if {"data_source", "ground_truth"} <= {*(getattr(one, "column_names", None) or ())} and hasattr(one, "unique")
    ]
