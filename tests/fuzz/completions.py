"""Every built-in reward, found by its first parameter `completions`, and texts for it that a reader could choke on."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import cache, partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

FUNCTION = re.compile(r"^def ([a-z]\w*)\(\s*completions\b(?:(?!ground_truth)[^()])*\*\*", re.MULTILINE)
SRC = Path(__file__).resolve().parents[2] / "src"
TABLE = {"rows": [["1", "Ann"], ["2", "Bob"]]}
TRUTHS: dict[str, Any] = {"logic__zebra": TABLE, "logic__ordering": ["a", "b"], "simulation": {"out": [1, True]}} | {
    "codegen": ["assert f(1) == 3", "assert math.isclose(abs(f(1) - 2), 1) == True"]
}
COLUMNS = {"answer": "18", "test_list": TRUTHS["codegen"], "aliases": ["Paris"], "wanted": "a"}
TAGS = "<answer> </answer> <reasoning> </reasoning> <end_working_out> <SOLUTION> </SOLUTION> <|a|>"
MARKS = r"""``` #### \boxed{ \frac{1}{2} $ ]]} } { [ ( - , . * ! \ ' f( "\ud800" 1e999999 9**9**9 NaN eggs"""
PIECES = [
    *(*TAGS.split(), *MARKS.split(), "```\n", "```python\n", '{"rows": [[', "{'out': ", "x: ", "not ", "1 billion "),
    *("0x" + "f" * 5000, "9" * 5000, "9" * 90, "a" * 40, " ", "\n", "\0", "\ud800", "\u0663", "\u00b2"),
]
REPEATED = st.tuples(st.sampled_from(PIECES) | st.text(max_size=4), st.sampled_from([1, 1, 1, 2, 30, 300]))
TEXTS = st.lists(REPEATED, max_size=6).map(lambda parts: "".join(piece * times for piece, times in parts))
FORMS = ["{}", "<answer>{}</answer>", "x<end_working_out><SOLUTION>{}</SOLUTION>", "```python\n{}\n```"]
FORMS.append("\\boxed{{{}}}")


@cache
def rewards() -> list[Any]:
    """The functions of `src`, and `score` for each source, which calls those that read a ground truth."""
    from async_grpo.tasks.scores import BUILT_IN, score

    of_sources = [partial(score, data_source=[it], ground_truth=[json.dumps(TRUTHS.get(it, "18"))]) for it in BUILT_IN]
    return [*_functions(), *of_sources]


def _functions() -> Iterator[Any]:
    for path in sorted(SRC.rglob("*.py")):
        for name in FUNCTION.findall(path.read_text(encoding="utf-8")):
            yield getattr(import_module(".".join(path.relative_to(SRC).with_suffix("").parts)), name)


def pay(data: bytes, _: Path) -> None:
    """Have every reward pay this text, in each form that it takes. Programs print it, the judge says yes."""
    text = data.decode(errors="surrogateescape")
    printed = "".join(f"{index} {json.dumps(text)}\n" for index in range(4))
    ran = SimpleNamespace(exit_code=0, stdout=printed)
    said = {"data": [{"id": "judge"}], "choices": [{"message": {"content": "yes"}}]}
    message = {"role": "assistant", "content": text, "tool_calls": [{"type": "function"}]}
    talk = [message, {"role": "tool", "content": text}, {"role": "assistant", "content": text}]
    with (
        patch("async_grpo.rewards.programs.run_code", lambda *_, **__: ran),
        patch("async_grpo.tasks.rules.run_code", lambda *_, **__: ran),
        patch("async_grpo.tasks.scores._asked", lambda _, body=None: json.dumps(body) and said),
    ):
        for reward in rewards():
            takes = str(signature(reward).parameters["completions"].annotation)
            for form in [text] * ("str" in takes or "Any" in takes) + [talk] * ("str" not in takes):
                columns = {} if isinstance(reward, partial) else {name: [value] for name, value in COLUMNS.items()}
                (paid,) = reward([form], **columns)
                assert math.isfinite(paid), (reward, paid)


def _once_loaded() -> st.SearchStrategy[bytes]:
    """The texts. What the rewards import, and the grammar of math-verify, take no input's time."""
    pay(b"", Path())
    return st.builds(lambda form, text: form.format(text).encode(errors="surrogatepass"), st.sampled_from(FORMS), TEXTS)


COMPLETIONS = st.deferred(_once_loaded)
