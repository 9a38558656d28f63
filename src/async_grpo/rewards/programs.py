"""Rewards for programs: MBPP. The tests of one completion run in one start of the sandbox.

A test is `assert EXPRESSION == LITERAL`. Only the calls of the expression go into the sandbox; the literal stays here,
and what comes back is compared with it here (`verdicts`). So a program that reads its own source, patches `assert`,
returns objects that equal everything, or exits early gains nothing by it: it would have to know the literal.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from async_grpo.rewards.answers import parse
from async_grpo.rewards.sandbox import Limits, run_code
from async_grpo.rewards.verdicts import ERRORS, answered, questions

SECONDS = 5.0  # for one test
SUCCESS = 0.6
MAX_TESTS = 50
MAX_CHARACTERS = 50_000  # of a program
OUTPUT_BYTES = 1 << 20
_FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


class Check(NamedTuple):
    """One test."""

    test: ast.expr
    questions: list[str]  # what the sandbox evaluates of it


def mbpp(completions: Sequence[Any], test_list: Sequence[Sequence[str]], **_: Any) -> list[float]:
    """0.7 × the share of tests passed, and 0.1 each for a program that parses, the answer's tags, and thinking.

    Args:
        test_list: the dataset's column: for each completion its tests, e.g. `["assert add(1, 2) == 3"]`.

    Raises:
        SandboxError: programs may not run, or cannot be isolated here.
        ValueError: a test is not of the form `assert EXPRESSION == LITERAL`.
    """
    checks = [list(map(check, tests)) for tests in test_list]
    return [_reward(completion, asked) for completion, asked in zip(completions, checks, strict=True)]


mbpp.success_threshold = SUCCESS  # type: ignore[attr-defined]
mbpp.thread_safe = True  # type: ignore[attr-defined]
mbpp.require = lambda: run_code("pass")  # type: ignore[attr-defined]  # raises where no program may run, or can


def check(test: str) -> Check:
    """A test in two parts. `ValueError` if it is of another form."""
    try:
        (statement,) = ast.parse(test.strip()).body
        if not isinstance(statement, ast.Assert) or not isinstance(statement.test, ast.Compare):
            raise ValueError("it compares nothing")
        (comparison,), (literal,) = statement.test.ops, statement.test.comparators
        if not isinstance(comparison, (ast.Eq, ast.Is)):
            raise ValueError("it does not use ==")
        ast.literal_eval(literal)
        return Check(statement.test, questions(statement.test))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"The test {test!r} is not of the form `assert EXPRESSION == LITERAL`: {error}.") from error


def _reward(completion: Any, checks: Sequence[Check]) -> float:
    part = parse(completion)
    program = _program(part.solution or "")
    parses = bool(program.strip()) and _parses(program)
    passed = share_passed(program, checks) if parses else 0.0
    return round(0.7 * passed + 0.1 * parses + 0.1 * part.tagged + 0.1 * part.thinks, 6)


def share_passed(program: str, checks: Sequence[Check]) -> float:
    """How many of the tests the program passes, from 0 to 1."""
    asked = checks[:MAX_TESTS]
    if not asked or len(program) > MAX_CHARACTERS:
        return 0.0
    expressions = [question for one in asked for question in one.questions]
    result = run_code(
        _HARNESS,
        stdin=json.dumps({"program": program, "expressions": expressions, "seconds": SECONDS}),
        limits=Limits(wall_s=SECONDS * (len(expressions) + 1), output_bytes=OUTPUT_BYTES),
    )
    found = _answers(result.stdout)
    answers = (found.get(index) for index in range(len(expressions)))
    return sum([_passes(one, list(islice(answers, len(one.questions)))) for one in asked]) / len(asked)


def _program(solution: str) -> str:
    fenced = _FENCE.match(solution)
    return fenced[1] if fenced else solution


def _parses(program: str) -> bool:
    try:
        ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _answers(output: str) -> dict[int, str]:
    """The value of each expression, as Python source; the first where there are several."""
    found: dict[int, str] = {}
    for line in output.splitlines():
        index, separator, value = line.partition(" ")
        if separator and index.isdecimal() and len(index) < 6:
            found.setdefault(int(index), value)
    return found


def _passes(check: Check, sources: list[str | None]) -> bool:
    """Whether a test holds for these values, each the source of a literal as JSON; None: there is none."""
    try:
        values = [ast.literal_eval(json.loads(source or "")) for source in sources]
        return bool(answered(check.test, iter(values)))
    except ERRORS:
        return False


# Each expression is evaluated in a process of its own, so that one that hangs or exits costs the others nothing. The
# value comes back as its `repr` where it consists of plain types alone, and fits into a pipe.
_HARNESS = """
import json, os, signal, sys, time

def plain(value):
    if type(value) in (list, tuple, set, frozenset):
        return all(map(plain, value))
    if type(value) is dict:
        return all(map(plain, value)) and all(map(plain, value.values()))
    return value is None or type(value) in (int, float, str, bool, bytes, complex)

def answer(asked, index, pipe):
    os.setsid()
    sink = os.open("output", os.O_CREAT | os.O_RDWR | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    names = {"__name__": "candidate"}
    exec(compile(asked["program"], "candidate", "exec"), names)
    value = eval(asked["expressions"][index], names)
    text = json.dumps(repr(value)) if plain(value) else ""
    if len(text) < 60000:
        os.write(pipe, text.encode())

def end_of(child, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.002)
    for kill, number in ((os.killpg, child), (os.kill, child)):
        try:
            kill(number, signal.SIGKILL)
        except OSError:
            pass

asked = json.loads(sys.stdin.read())
for index in range(len(asked["expressions"])):
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer(asked, index, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    end_of(child, asked["seconds"])
    os.set_blocking(mine, False)
    try:
        value = os.read(mine, 1 << 16).decode(errors="replace")
    except BlockingIOError:
        value = ""
    os.close(mine)
    print(index, value, flush=True)
"""
