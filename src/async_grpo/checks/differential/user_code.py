"""Notes around the user's own code: rewards, tools, callbacks, overrides of TRL's methods and patches of them.

Each function is replaced where it is found by one of the same kind that notes what it is given and calls it. That
happens once the run has made its own checks, so that they see what they would see without a check.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_grpo.checks.differential.held_state import held_state
from async_grpo.checks.differential.notes import Note, Notes, noted

End = Callable[[Any], None]  # takes what the function returned, or the exception that it raised
Begin = Callable[[Sequence[Any], dict[str, Any]], End]

_NOT_INPUTS = ("log_extra", "log_metric", "trainer_state")
_LIBRARIES = ("trl", "transformers", "accelerate", "peft", "torch", "async_grpo")


def note_rewards_and_tools(trainer: Any, notes: Notes) -> None:
    """Note from now on what is given to them where they are called: in the worker of a run, and in plain TRL."""
    for place, (name, function) in enumerate(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)):
        if not hasattr(function, "forward"):  # a model: its scores are compared
            trainer.reward_funcs[place] = around(function, _scoring(notes, name, function))
    if inspect.isroutine(trainer.rollout_func):
        trainer.rollout_func = around(trainer.rollout_func, _rollouts(notes))
    _note_tools(trainer, notes)


def note_callbacks(trainer: Any, notes: Notes) -> None:
    """Note from now on what the user's callbacks are given: in the server of a run, and in plain TRL."""
    for callback in trainer.callback_handler.callbacks:
        if _is_users(type(callback)):
            _note_callback(callback, notes)


def note_methods(trainer: Any, notes: Notes) -> None:
    """Note from now on what is given to the user's code in the place of methods of TRL's."""
    methods = [*own_methods(trainer)]
    notes.add("methods", names=sorted({name for _, name, _ in methods}))
    for owner, name, function in methods:
        setattr(owner, name, around(function, _method(notes, name)))


def around(function: Callable[..., Any], begin: Begin) -> Callable[..., Any]:
    """The function, with `begin` called before it and what that returns after it."""
    from trl.trainer.utils import is_async_callable

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        with _ended(begin(args, kwargs)) as returned:
            returned.append(await function(*args, **kwargs))
        return returned[0]

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        with _ended(begin(args, kwargs)) as returned:
            returned.append(function(*args, **kwargs))
        return returned[0]

    return later if is_async_callable(function) else now


@contextlib.contextmanager
def _ended(end: End) -> Iterator[list[Any]]:
    returned: list[Any] = []
    try:
        yield returned
    except BaseException as error:
        end(error)
        raise
    end(returned[0])


def _scoring(notes: Notes, name: str, function: Any) -> Begin:
    def begin(args: Sequence[Any], kwargs: dict[str, Any]) -> End:
        items, before = items_of(kwargs), held_state(function)

        def end(returned: Any) -> None:
            if not isinstance(returned, BaseException):  # a worker repeats a call that fails, in the main thread say
                values = [None if value is None else float(value) for value in returned]
                notes.add("scored", of=name, items=items, values=values, before=before, after=held_state(function))

        return end

    return begin


def items_of(kwargs: dict[str, Any]) -> list[Note]:
    """What a call of a reward function is given of each completion."""
    size = len(kwargs["completions"])
    state = {f"trainer_state.{name}": value for name, value in vars(kwargs.get("trainer_state", _Empty())).items()}
    common = {name: noted(_number(value)) for name, value in state.items() if type(value) in (bool, int, float, str)}
    columns: dict[str, list[Any]] = {}
    for name, value in kwargs.items():
        if name not in _NOT_INPUTS:
            each = value if isinstance(value, list) and len(value) == size else [value] * size
            columns[name] = [
                noted(vars(it) if name == "environments" and hasattr(it, "__dict__") else it) for it in each
            ]
    return [{**common, **{name: column[place] for name, column in columns.items()}} for place in range(size)]


class _Empty: ...


def _number(value: Any) -> Any:
    """One type for numbers: TRL has 1 where a job has 1.0."""
    return float(value) if type(value) is int else value


def _rollouts(notes: Notes) -> Begin:
    """Also what it returned: where it samples by itself, plain TRL is given the same."""

    def begin(args: Sequence[Any], kwargs: dict[str, Any]) -> End:
        prompts = [noted(prompt)[0] for prompt in args[0]]

        def end(returned: Any) -> None:
            if isinstance(returned, dict):
                output = {name: it.tolist() if hasattr(it, "tolist") else it for name, it in returned.items()}
                notes.add("rollouts", prompts=prompts, output=output)

        return end

    return begin


def _note_tools(trainer: Any, notes: Notes) -> None:
    if not trainer.tools:
        return
    trainer._standalone_tools[:] = [around(tool, _tool(notes, tool.__name__)) for tool in trainer._standalone_tools]
    noted_classes: set[type] = set()
    for name, factory in (trainer.environment_factories or {}).items():
        trainer.environment_factories[name] = functools.partial(_environment, factory, notes, noted_classes)


def _environment(factory: Callable[[], Any], notes: Notes, noted_classes: set[type]) -> Any:
    """An environment of the user's, whose methods are noted. TRL finds them by its class."""
    environment = factory()
    kind = type(environment)
    if kind not in noted_classes:
        noted_classes.add(kind)
        for name, method in inspect.getmembers(kind, predicate=inspect.isfunction):
            if not name.startswith("_") and name != "get_reward":
                setattr(kind, name, around(method, _tool(notes, f"{kind.__name__}.{name}", skip=1)))
    return environment


def _tool(notes: Notes, name: str, skip: int = 0) -> Begin:
    def begin(args: Sequence[Any], kwargs: dict[str, Any]) -> End:
        given = noted([list(args[skip:]), kwargs])

        def end(returned: Any) -> None:
            notes.add("tool", of=name, given=given, returned=noted(returned))

        return end

    return begin


def _note_callback(callback: Any, notes: Notes) -> None:
    from transformers import TrainerCallback

    for event in (name for name in vars(TrainerCallback) if name.startswith("on_")):
        if getattr(type(callback), event, None) is not getattr(TrainerCallback, event):
            setattr(callback, event, around(getattr(callback, event), _event(notes, callback, event)))


def _event(notes: Notes, callback: Any, event: str) -> Begin:
    def begin(args: Sequence[Any], kwargs: dict[str, Any]) -> End:
        state = args[1] if len(args) > 1 else kwargs["state"]
        notes.add("event", of=type(callback).__name__, event=event, step=int(state.global_step))
        return lambda returned: None

    return begin


def _method(notes: Notes, name: str) -> Begin:
    """Per completion where the method gets a list of them, or tensors with a row for each."""

    def begin(args: Sequence[Any], kwargs: dict[str, Any]) -> End:
        lists = (it for it in [*args[1:], *kwargs.values()] if isinstance(it, list))
        items = [noted(it) for it in next(lists, [])]
        notes.add("method", of=name, items=items, size=len(items) or _rows(args[1:]))
        return lambda returned: None

    return begin


def _rows(args: Sequence[Any]) -> int:
    tensors = (it for arg in args if isinstance(arg, dict) for it in arg.values() if getattr(it, "ndim", 0) > 0)
    return next((len(tensor) for tensor in tensors), 1)


def own_methods(trainer: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Where the user's code takes the place of a method of TRL's: the owner, the name, the function.

    In a subclass, as a patch of TRL's classes, or assigned to the trainer.
    """
    from trl import GRPOTrainer as TRLTrainer

    for owner in type(trainer).__mro__:
        for name, function in [*vars(owner).items()]:
            if not inspect.isfunction(function) or name == "__init__":
                continue
            of_trl = owner in TRLTrainer.__mro__
            if (_is_foreign(function) if of_trl else _is_users(owner)) and hasattr(TRLTrainer, name):
                yield owner, name, function
    for name, function in [*vars(trainer).items()]:
        if callable(function) and hasattr(TRLTrainer, name) and _is_foreign(inspect.unwrap(function)):
            yield trainer, name, function


def _is_users(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in (*_LIBRARIES, "abc", "builtins", "typing")


@functools.cache
def _folders() -> tuple[str, ...]:
    """Where code is that is nobody's patch."""
    found = (importlib.util.find_spec(name) for name in _LIBRARIES)
    folders = [str(Path(spec.origin).parent) for spec in found if spec is not None and spec.origin is not None]
    return (*folders, contextlib.__file__, functools.__file__)


def _is_foreign(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not str(code.co_filename).startswith(_folders())
