"""Rewards for programs: MBPP. The tests of one completion run in one start of the sandbox.

A test is `assert EXPRESSION == LITERAL`. Only the calls of the expression go into the sandbox; the literal stays here,
and what comes back is compared with it here. So a program that reads its own source, patches `assert`, returns objects
that equal everything, or exits early gains nothing by it: it would have to know the literal.

    assert (f(1) == 3) == True        ->  the sandbox evaluates f(1); the comparisons are made here

So operators and a few functions of Python around the calls are evaluated here, on what came back as plain data.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from async_grpo.rewards.answers import parse
from async_grpo.rewards.sandbox import Limits, run_code

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda value, expected: same(value, expected),
    ast.NotEq: lambda value, expected: not same(value, expected),
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    # `is` in such a test means equality: objects do not come out of the sandbox.
    ast.Is: lambda value, expected: same(value, expected),
    ast.IsNot: lambda value, expected: not same(value, expected),
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "round": round,
    "bool": bool,
    "math.isclose": math.isclose,
}
ERRORS = (ValueError, SyntaxError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError)
SECONDS = 5.0  # for one test
SUCCESS = 0.6
MAX_TESTS = 50
MAX_CHARACTERS = 50_000  # of a program
OUTPUT_BYTES = 1 << 20
_FENCE = re.compile(r"\A\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*\Z", re.DOTALL)


def same(value: Any, expected: Any) -> bool:
    """Whether plain data is what a test expects. 1 equals 1.0, as `==` would say; True is no number here."""
    numbers = (int, float)
    if type(value) is type(expected) or (type(value) in numbers and type(expected) in numbers):
        return bool(value == expected)
    return False


def questions(test: ast.expr) -> list[str]:
    """What the sandbox evaluates of a test, in the order in which `answered` takes the values.

    Raises:
        ValueError: a comparison would be made in the sandbox.
    """
    operands = _operands(test)
    if operands is not None:
        return [question for operand in operands for question in questions(operand)]
    if _is_literal(test):
        return []
    if _compares(test):
        raise ValueError("it compares inside of an expression")
    return [ast.unparse(test)]


def answered(test: ast.expr, values: Iterator[Any]) -> Any:
    """The value of a test, where its questions have these values. `ERRORS`: it has none."""
    operands = _operands(test)
    if operands is None:
        return ast.literal_eval(test) if _is_literal(test) else next(values)
    found = [answered(operand, values) for operand in operands]
    match test:
        case ast.Compare():
            pairs = zip(test.ops, found, found[1:], strict=False)
            return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
        case ast.BoolOp():
            return all(found) if isinstance(test.op, ast.And) else any(found)
        case ast.UnaryOp():
            return not found[0]
        case ast.BinOp():
            return _ARITHMETIC[type(test.op)](*found)
        case ast.Call():
            names = [keyword.arg or "" for keyword in test.keywords]
            positional = found[: len(found) - len(names)]
            return _FUNCTIONS[ast.unparse(test.func)](*positional, **dict(zip(names, found[len(positional) :])))
    raise AssertionError(test)


def _operands(node: ast.expr) -> list[ast.expr] | None:
    """What a node combines that is evaluated here; None: the node is a literal, or the sandbox's."""
    match node:
        case ast.Compare():
            return [node.left, *node.comparators]
        case ast.BoolOp():
            return node.values
        case ast.UnaryOp(op=ast.Not()):
            return [node.operand]
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return [node.left, node.right]
        case ast.Call() if ast.unparse(node.func) in _FUNCTIONS and all(one.arg for one in node.keywords):
            return [*node.args, *(one.value for one in node.keywords)]
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except ERRORS:
        return False
    return True


def _compares(node: ast.AST) -> bool:
    """Whether it compares what the program returned. The arguments of the program's own functions are its inputs."""
    if isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and hasattr(builtins, node.func.id)):
        return _compares(node.func)
    return isinstance(node, ast.Compare) or any(map(_compares, ast.iter_child_nodes(node)))


class Check(NamedTuple):
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
