"""A test of a program in two parts: what the sandbox evaluates, and the verdict, which is made here.

    assert (f(1) == 3) == True        ->  the sandbox evaluates f(1); the comparisons are made here

A comparison in the sandbox would be the model's to answer, by an object with an `__eq__` of its own. So operators and
a few functions of Python around the calls are evaluated here, on what came back as plain data.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
