r"""The built-in rewards: what each data source of Guru's recipes pays, from 0 to 1.

Each is a reward function of TRL's, with `ground_truth` and `extra_info` as the values that the rows have. The answer of
a completion is in its last `<answer>…</answer>`, else where `rewards.answers.final_answer` finds it.
"""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from async_grpo.rewards.answers import final_answer, last_number, text_of
from async_grpo.rewards.deadline import with_deadline
from async_grpo.rewards.mathematics import same_answers
from async_grpo.rewards.programs import MAX_TESTS, check, share_passed
from async_grpo.rewards.sandbox import Limits, run_code
from async_grpo.rewards.wording import one_number

SECONDS = 5.0  # for one completion, or for one test of a program
LONGEST = 100_000  # characters of an answer that is read as data
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCED = re.compile(r"```(\w*)[ \t]*\n(.*?)```", re.DOTALL)


def math(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float]:
    r"""1 for an answer that is mathematically equal: in `\boxed{}`, after `####`, or the last number."""
    found = [_answer(text_of(one)) or last_number(one) for one in completions]
    return same_answers(found, [*map(str, ground_truth)])


def codegen(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float]:
    """1 for a program that passes all tests. The program is the last block of code.

    The tests are asserts (`{"functional": …}`, a list or a text), or `{"inputs": […], "outputs": […]}` of a program's
    standard streams, or, with `fn_name`, of a function.

    Raises:
        SandboxError: programs may not run, or cannot be isolated here.
        ValueError: the tests are of another form.
    """
    return [
        float(_passes_all(_program(text_of(one)), truth)) for one, truth in zip(completions, ground_truth, strict=True)
    ]


for _reward in (math, codegen):
    _reward.thread_safe = True  # type: ignore[attr-defined]
codegen.require = lambda: run_code("pass")  # type: ignore[attr-defined]  # raises where no program may run, or can


def zebra(text: str, truth: Any) -> float:
    """The share of the cells of `{"header": […], "rows": [[…]]}` that are right."""
    right, given = _cells(truth), _cells(_data(text))
    return sum(given.get(place) == value for place, value in right.items()) / len(right)


def _cells(table: Any) -> dict[tuple[int, int], str]:
    rows = table.get("rows") if isinstance(table, dict) else None
    lists = [row if isinstance(row, list) else [] for row in (rows if isinstance(rows, list) else [])]
    return {(at, column): _plain(value) for at, row in enumerate(lists) for column, value in enumerate(row)}


def ordering(text: str, truth: Any) -> float:
    """1 for the same names in the same order."""
    given = _data(text)
    return float(isinstance(given, list) and [*map(_plain, given)] == [*map(_plain, truth)])


def same_text(text: str, truth: Any) -> float:
    """1 for the same text, without regard to case, or the same number."""
    given, expected = _answer(text) or "", str(truth)
    number = one_number(given)
    return float(_plain(given) == _plain(expected) or (number is not None and number == one_number(expected)))


def same_data(text: str, truth: Any) -> float:
    """1 for equal JSON. True is no number; 1 equals 1.0."""
    return float(_equal(_data(text), _value(truth)))


Rule = Callable[[str, Any], float]


@with_deadline(seconds=SECONDS)
def _by_rule(completions: Sequence[str], ground_truth: Sequence[Any], rule: Sequence[Rule], **_: Any) -> list[float]:
    return [rule[0](completions[0], ground_truth[0])]


def by_rule(rule: Rule) -> Callable[..., list[float]]:
    """The reward function of one of the rules. They share their processes."""

    def rewarded(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float]:
        texts = [text_of(one) for one in completions]
        given: Any = _by_rule(texts, ground_truth=[*ground_truth], rule=[rule] * len(texts))
        return given

    rewarded.__name__ = rule.__name__
    rewarded.thread_safe = True  # type: ignore[attr-defined]
    return rewarded


# What a completion says


def _answer(text: str) -> str | None:
    tagged = _ANSWER.findall(text)
    return tagged[-1].strip() if tagged else final_answer(text)


_NOTHING = object()  # no data; None is some


def _data(text: str) -> Any:
    """The answer as data: JSON or a Python literal, also in a block of code; `_NOTHING` where it is none."""
    answer = _answer(text)
    fenced = _FENCED.findall(text if answer is None else answer)
    return _read(fenced[-1][1] if fenced else answer or "")


def _read(text: str) -> Any:
    if len(text) > LONGEST:
        return _NOTHING
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return _NOTHING


def _value(truth: Any) -> Any:
    """What a text says as data; another one as it is."""
    read = _read(truth) if isinstance(truth, str) else truth
    return truth if read is _NOTHING else read


def _plain(value: Any) -> str:
    return " ".join(str(value).casefold().split())


def _equal(given: Any, expected: Any) -> bool:
    if isinstance(expected, dict) and isinstance(given, dict):
        return given.keys() == expected.keys() and all(_equal(given[key], value) for key, value in expected.items())
    if isinstance(expected, list) and isinstance(given, (list, tuple)):
        return len(given) == len(expected) and all(map(_equal, given, expected))
    return isinstance(given, bool) == isinstance(expected, bool) and bool(given == expected)


# Programs


def _program(text: str) -> str:
    blocks = _FENCED.findall(text)
    return blocks[-1][1] if blocks else final_answer(text) or ""


def _passes_all(program: str, truth: Any) -> bool:
    if not program.strip():
        return False
    tests = _value(truth)
    has_pairs = isinstance(tests, dict) and {"inputs", "outputs"} <= tests.keys()
    pairs = list(zip(tests["inputs"], tests["outputs"], strict=True)) if has_pairs else []
    if pairs and not tests.get("fn_name"):
        return all(_prints(program, given, expected) for given, expected in pairs)
    calls = (f"assert {tests['fn_name']}({', '.join(map(repr, given))}) == {right!r}" for given, right in pairs)
    checks = [*map(check, calls if has_pairs else _asserts(tests))]
    if not checks:
        raise ValueError(f"A program has no tests: {str(truth)[:60]!r}")
    parts = (checks[start : start + MAX_TESTS] for start in range(0, len(checks), MAX_TESTS))
    return all(share_passed(program, part) == 1.0 for part in parts)


def _asserts(tests: Any) -> Iterator[str]:
    """The asserts of a text; those in `def check(candidate)` with what `check` is called with."""
    source = tests.get("functional") if isinstance(tests, dict) else tests
    source = "\n".join(source) if isinstance(source, list) else source
    if not isinstance(source, str):
        raise ValueError(f"The tests of a program are none of asserts, inputs and outputs: {str(tests)[:60]!r}")
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ValueError(f"The tests of a program are no Python: {source[:60]!r} ({error.msg})") from None
    bodies = {one.name: one for one in statements if isinstance(one, ast.FunctionDef) and len(one.args.args) == 1}
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) if name in bodies:
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[candidate], keywords=[])):
                if name not in bodies:
                    raise ValueError(f"The tests of a program call {name}, which they do not define")
                yield from map(ast.unparse, _with_argument(bodies[name], candidate).body)
            case _:
                yield ast.unparse(statement)


def _with_argument(function: ast.FunctionDef, given: ast.expr) -> ast.FunctionDef:
    """A copy with an expression in the place of the only argument."""
    copied, name = copy.deepcopy(function), function.args.args[0].arg
    for node in ast.walk(copied):
        if isinstance(node, ast.Name) and node.id == name:
            node.id = f"({ast.unparse(given)})"
    return copied


def _prints(program: str, given: Any, expected: Any) -> bool:
    text, wanted = (one if isinstance(one, str) else "\n".join(map(str, one)) for one in (given, expected))
    result = run_code(program, stdin=text, limits=Limits(wall_s=SECONDS))
    return result.exit_code == 0 and _lines(result.stdout) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
