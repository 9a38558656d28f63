"""A judge that is asked over HTTP, by OpenAI's API, whether an answer says what the right one says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from async_grpo.errors import AsyncGRPOError, UsageError
from async_grpo.rewards.answers import final_answer, text_of

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
    questions = prompts or [""] * len(completions)
    rows = zip(questions, completions, ground_truth, strict=True)
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
