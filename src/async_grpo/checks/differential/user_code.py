"""Notes around the user's own code: rewards, tools, callbacks, overrides of TRL's methods and patches of them.

Each function is replaced where it is found by one of the same kind that notes what it is given and calls it. That
happens once the run has made its own checks, so that they see what they would see without a check.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any

from async_grpo.checks.differential.notes import Note, Notes, noted
from async_grpo.rollout.held_data import held_by
from async_grpo.setup.replaced import of_libraries, replaced_at

Noting = Generator[None, Any, None]  # goes on with what the function returned, or the exception that it raised

_NOT_INPUTS = ("log_extra", "log_metric", "trainer_state")
_LIBRARIES = ("trl", "transformers", "accelerate", "peft", "torch", "async_grpo", "abc", "builtins", "typing")


def note_rewards_and_tools(trainer: Any, notes: Notes) -> None:
    """Note from now on what is given to them where they are called: in the worker of a run, and in plain TRL."""
    for index, (name, function) in enumerate(zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)):
        if not hasattr(function, "forward"):  # a model: its scores are compared
            trainer.reward_funcs[index] = around(function, partial(_scoring, notes, name, function))
    if inspect.isroutine(trainer.rollout_func):
        trainer.rollout_func = around(trainer.rollout_func, partial(_rollouts, notes))
    if trainer.tools:
        tools = trainer._standalone_tools
        tools[:] = [around(tool, partial(_tool, notes, tool.__name__, 0)) for tool in tools]
        seen: set[type] = set()
        for name, factory in (trainer.environment_factories or {}).items():
            trainer.environment_factories[name] = partial(_environment, factory, notes, seen)


def note_callbacks(trainer: Any, notes: Notes) -> None:
    """Note from now on what the user's callbacks are given: in the server of a run, and in plain TRL."""
    from transformers import TrainerCallback

    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        for event in events if kind.__module__.partition(".")[0] not in _LIBRARIES else ():
            if getattr(kind, event, None) is not getattr(TrainerCallback, event):
                noting = partial(_event, notes, kind.__name__, event)
                setattr(callback, event, around(getattr(callback, event), noting))


def note_methods(trainer: Any, notes: Notes) -> None:
    """Note from now on what is given to the user's code in the place of methods of TRL's."""
    methods = [
        (owner, name, function)
        for owner, name, function in replaced_at(trainer)
        if name != "__init__" and _is_users(function)
    ]
    notes.add("methods", names=sorted({name for _, name, _ in methods}))
    for owner, name, function in methods:
        setattr(owner, name, around(function, partial(_method, notes, name)))


def _is_users(function: Any) -> bool:
    if not (inspect.isroutine(function) or isinstance(function, partial)):
        return False
    ours = str(getattr(inspect.unwrap(function), "__module__", "")).startswith("async_grpo.")
    return not ours and not of_libraries(function)


def around(function: Callable[..., Any], noting: Callable[[Sequence[Any], dict[str, Any]], Noting]) -> Any:
    """The function, with `noting` begun before it, which goes on after it."""
    from trl.trainer.utils import is_async_callable

    @functools.wraps(function)
    async def later(*args: Any, **kwargs: Any) -> Any:
        with _told(noting(args, kwargs)) as returned:
            returned.append(await function(*args, **kwargs))
        return returned[0]

    @functools.wraps(function)
    def now(*args: Any, **kwargs: Any) -> Any:
        with _told(noting(args, kwargs)) as returned:
            returned.append(function(*args, **kwargs))
        return returned[0]

    return later if is_async_callable(function) else now


@contextlib.contextmanager
def _told(noting: Noting) -> Iterator[list[Any]]:
    returned: list[Any] = []
    next(noting)
    try:
        yield returned
    except BaseException as error:
        returned.append(error)
        raise
    finally:
        with contextlib.suppress(StopIteration):
            noting.send(returned[0])


def _scoring(notes: Notes, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Noting:
    items, before, generators = items_of(kwargs), held_state(function), _random_states()
    returned = yield
    if not isinstance(returned, BaseException):  # a worker repeats a call that fails, in the main thread say
        values = [None if value is None else float(value) for value in returned]
        after, moved = held_state(function), [it for it, state in _random_states().items() if state != generators[it]]
        notes.add("scored", of=name, items=items, values=values, before=before, after=after, moved=moved)


def _random_states() -> dict[str, str]:
    """Digests of the states that random numbers are drawn from, by library."""
    import numpy as np
    import torch

    states = {"torch": torch.random.get_rng_state(), "random": random.getstate(), "numpy": np.random.get_state()}
    return {library: noted(state)[0] for library, state in states.items()}


def items_of(kwargs: dict[str, Any]) -> list[Note]:
    """A reward function's inputs, by completion."""
    size, state = len(kwargs["completions"]), getattr(kwargs.get("trainer_state"), "__dict__", {})
    common = {  # TRL has 1 where a job has 1.0
        f"trainer_state.{name}": noted(float(value) if type(value) is int else value)
        for name, value in state.items()
        if type(value) in (bool, int, float, str)
    }
    columns: dict[str, list[Any]] = {}
    for name, value in kwargs.items():
        if name not in _NOT_INPUTS:
            each = value if isinstance(value, list) and len(value) == size else [value] * size
            of_environment = name == "environments"
            columns[name] = [noted(vars(it) if of_environment and hasattr(it, "__dict__") else it) for it in each]
    return [{**common, **{name: column[index] for name, column in columns.items()}} for index in range(size)]


def _rollouts(notes: Notes, args: Sequence[Any], kwargs: dict[str, Any]) -> Noting:
    """Note also what it returned: where it samples by itself, plain TRL is given the same."""
    prompts = [noted(prompt)[0] for prompt in args[0]]
    returned = yield
    if isinstance(returned, dict):
        output = {name: it.tolist() if hasattr(it, "tolist") else it for name, it in returned.items()}
        notes.add("rollouts", prompts=prompts, output=output)


def _environment(factory: Callable[[], Any], notes: Notes, seen: set[type]) -> Any:
    """An environment of the user's, whose methods are noted. TRL finds them by its class."""
    environment = factory()
    kind = type(environment)
    if kind not in seen:
        seen.add(kind)
        for name, method in inspect.getmembers(kind, predicate=inspect.isfunction):
            if not name.startswith("_") and name != "get_reward":
                setattr(kind, name, around(method, partial(_tool, notes, f"{kind.__name__}.{name}", 1)))
    return environment


def _tool(notes: Notes, name: str, skip: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Noting:
    given = noted([list(args[skip:]), kwargs])
    returned = yield
    notes.add("tool", of=name, given=given, returned=noted(returned))


def _event(notes: Notes, of: str, event: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Noting:
    state = args[1] if len(args) > 1 else kwargs["state"]
    notes.add("event", of=of, event=event, step=int(state.global_step))
    yield


def _method(notes: Notes, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Noting:
    """Note per completion where the method gets a list of them, or tensors with a row for each."""
    items = [noted(it) for it in next((it for it in [*args[1:], *kwargs.values()] if isinstance(it, list)), [])]
    tensors = (it for arg in args[1:] if isinstance(arg, dict) for it in arg.values() if getattr(it, "ndim", 0) > 0)
    notes.add("method", of=name, items=items, size=len(items) or next((len(tensor) for tensor in tensors), 1))
    yield


def held_state(function: Any) -> dict[str, list[str]]:
    """What a function keeps between calls, as notes have values."""
    return {name: noted(value) for name, value in held_by(function).items()}
