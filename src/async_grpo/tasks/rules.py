r"""The built-in rewards: what each data source of Guru's recipes pays, from 0 to 1.

Each is a reward function of TRL's, with `ground_truth` and `extra_info` as the values that the rows have. The answer of
a completion is in its last `<answer>…</answer>`, else where `rewards.answers.final_answer` finds it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from async_grpo.rewards.answers import final_answer, last_number, text_of
from async_grpo.rewards.deadline import with_deadline
from async_grpo.rewards.mathematics import same_answers
from async_grpo.rewards.programs import ERRORS, MAX_TESTS, check, share_passed
from async_grpo.rewards.sandbox import Limits, run_code
from async_grpo.rewards.wording import one_number
from async_grpo.tasks.data import literal_of
from async_grpo.tasks.task_files import cut

SECONDS = 5.0  # for one completion, or for one test of a program
LONGEST = 100_000  # characters of an answer that is read as data
LONGEST_TRUTH = 1 << 28  # the same of a ground truth, which may be many tests
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCED = re.compile(r"```(\w*)[ \t]*\n(.*?)```", re.DOTALL)
_NOTHING = object()  # no data; None is some

Rule = Callable[[str, Any], float]


def math(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float]:
    r"""1 for an answer that is mathematically equal: in `\boxed{}`, after `####`, or the last number."""
    found = [_answer(text_of(one)) or last_number(one) for one in completions]
    return same_answers(found, [*map(text_truth, ground_truth)])


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


def zebra(text: str, truth: Mapping[tuple[int, int], str]) -> float:
    """The share of the cells of `{"header": […], "rows": [[…]]}` that are right."""
    given = _cells(_data(text))
    return sum(given.get(cell) == value for cell, value in truth.items()) / len(truth)


def ordering(text: str, truth: Sequence[str]) -> float:
    """1 for the same names in the same order."""
    given = _data(text)
    return float(isinstance(given, list) and [*map(_plain, given)] == truth)


def same_text(text: str, truth: str) -> float:
    """1 for the same text, without regard to case, or the same number."""
    given = _answer(text) or ""
    number = one_number(given)
    return float(_plain(given) == _plain(truth) or (number is not None and number == one_number(truth)))


def same_data(text: str, truth: Any) -> float:
    """1 for equal JSON. True is no number; 1 equals 1.0."""
    return float(_equal(_data(text), truth))


@with_deadline(seconds=SECONDS)
def _by_rule(completions: Sequence[str], ground_truth: Sequence[Any], rule: Sequence[Rule], **_: Any) -> list[float]:
    try:
        return [rule[0](completions[0], ground_truth[0])]
    except ERRORS:  # of what the completion says, such as a number with too many digits to be written
        return [0.0]


def by_rule(rule: Rule, reads: Callable[[Any], Any]) -> Callable[..., list[float]]:
    """The reward function of one of the rules. They share their processes.

    Args:
        reads: makes of a ground truth what the rule compares with. `ValueError`: it is none for this rule.
    """

    def rewarded(completions: Sequence[Any], ground_truth: Sequence[Any], **_: Any) -> list[float]:
        texts = [text_of(one) for one in completions]
        truths = [reads(one) for one in ground_truth]
        given: Any = _by_rule(texts, ground_truth=truths, rule=[rule] * len(texts))
        return given

    rewarded.__name__ = rule.__name__
    rewarded.thread_safe = True  # type: ignore[attr-defined]
    rewarded.rule, rewarded.reads = rule, reads  # type: ignore[attr-defined]
    return rewarded


# What a ground truth says


def cells_truth(truth: Any) -> dict[tuple[int, int], str]:
    """The cells of a table, by row and column."""
    cells = _cells(data_truth(truth))
    if not cells:
        raise _no_truth(truth, "a table with rows")
    return cells


def names_truth(truth: Any) -> list[str]:
    """A list of names."""
    names = data_truth(truth)
    if not isinstance(names, list) or not names:
        raise _no_truth(truth, "a list of names")
    return [*map(_plain, names)]


def text_truth(truth: Any) -> str:
    """A text, also of a number."""
    if isinstance(truth, (dict, list)) or truth is None or not str(truth).strip():
        raise _no_truth(truth, "a text or a number")
    return str(truth)


def data_truth(truth: Any) -> Any:
    """What a text says as data; another one as it is."""
    read = _read(truth, LONGEST_TRUTH) if isinstance(truth, str) else truth
    return truth if read is _NOTHING else read


def _no_truth(truth: Any, expected: str) -> ValueError:
    return ValueError(f"ground_truth must be {expected}, got {cut(repr(truth))}")


for _reward in (math, codegen):
    _reward.thread_safe = True  # type: ignore[attr-defined]
math.reads = text_truth  # type: ignore[attr-defined]
codegen.require = lambda: run_code("pass")  # type: ignore[attr-defined]  # raises where no program may run, or can


# What a completion says


def _answer(text: str) -> str | None:
    tagged = _ANSWER.findall(text)
    return tagged[-1].strip() if tagged else final_answer(text)


def _data(text: str) -> Any:
    """The answer as data: JSON or a Python literal, also in a block of code; `_NOTHING` where it is none."""
    answer = _answer(text)
    fenced = _FENCED.findall(text if answer is None else answer)
    return _read(fenced[-1][1] if fenced else answer or "")


def _read(text: str, longest: int = LONGEST) -> Any:
    if len(text) > longest:
        return _NOTHING
    for read in (json.loads, partial(literal_of, longest=longest)):
        try:
            return read(text.strip())
        except ERRORS:
            continue
    return _NOTHING


def _cells(table: Any) -> dict[tuple[int, int], str]:
    rows = table.get("rows") if isinstance(table, dict) else None
    lists = [row if isinstance(row, list) else [] for row in (rows if isinstance(rows, list) else [])]
    return {(at, column): _plain(value) for at, row in enumerate(lists) for column, value in enumerate(row)}


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
    match data_truth(truth):
        case {"inputs": [*inputs], "outputs": [*outputs], **more} if inputs and len(inputs) == len(outputs):
            pairs, function = list(zip(inputs, outputs, strict=True)), more.get("fn_name")
            if not function:
                return all(_prints(program, given, expected) for given, expected in pairs)
            if not all(isinstance(given, list) for given in inputs):
                raise _no_truth(inputs, f"for {function} a list of arguments as each input")
            asserts = [f"assert {function}({', '.join(map(repr, given))}) == {right!r}" for given, right in pairs]
        case {"functional": tests} | tests:
            program, asserts = _with_asserts(program, tests)
    checks = [*map(check, asserts)]
    parts = (checks[start : start + MAX_TESTS] for start in range(0, len(checks), MAX_TESTS))
    return all(share_passed(program, part) == 1.0 for part in parts)


def _with_asserts(program: str, tests: Any) -> tuple[str, list[str]]:
    """The asserts of a text or a list. Those in `def check(candidate)` need a line that says what `candidate` is."""
    source = "\n".join(tests) if isinstance(tests, list) and all(isinstance(one, str) for one in tests) else tests
    try:
        statements = ast.parse(source).body if isinstance(source, str) else []
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        statements = []
    asserts: list[str] = []
    bodies = {one.name: one for one in statements if isinstance(one, ast.FunctionDef) and len(one.args.args) == 1}
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) if name in bodies:
                continue
            case ast.Expr(value=ast.Call(func=ast.Name(id=name), args=[candidate], keywords=[])) if name in bodies:
                program += f"\n{bodies[name].args.args[0].arg} = {ast.unparse(candidate)}\n"
                asserts += map(ast.unparse, bodies[name].body)
            case _:
                asserts.append(ast.unparse(statement))
    if not asserts:
        raise _no_truth(tests, "tests: asserts, or as many inputs as outputs")
    return program, asserts


def _prints(program: str, given: Any, expected: Any) -> bool:
    text, wanted = ("\n".join(map(str, one)) if isinstance(one, list) else str(one) for one in (given, expected))
    result = run_code(program, stdin=text, limits=Limits(wall_s=SECONDS))
    return result.exit_code == 0 and _lines(result.stdout) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
