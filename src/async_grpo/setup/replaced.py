"""Methods of TRL's trainer that are not TRL's own any more: patched on a class, overridden in one, or assigned.

`note_originals` is called before the setup file is imported. It notes the methods of TRL's and transformers' trainers
when they have been imported, and imports nothing itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, TypeVar
from weakref import WeakSet

from async_grpo.setup.algorithm import declares
from async_grpo.setup.imports import when_imported

_CLASSES = {"transformers.trainer": "Trainer", "trl.trainer.grpo_trainer": "GRPOTrainer"}  # by module
_EQUIVALENT = "unsloth"  # begins the names of modules whose trainers do what TRL's do, faster
_LIBRARIES = ("trl.", "transformers.", "peft.", "torch.", "accelerate.", _EQUIVALENT)
_DUNDERS = set(vars(object)) - {"__init__"}

_Class = TypeVar("_Class", bound=type)

_originals: dict[type, dict[str, Any]] = {}
_adapters: WeakSet[type] = WeakSet()


def adapter(cls: _Class) -> _Class:
    """Declare a class that a run puts before the user's trainer class or behind it: what it has is not the user's."""
    _adapters.add(cls)
    return cls


def note_originals() -> None:
    """Note TRL's own methods before anybody can replace them. Harmless to call twice."""
    if not _originals:
        for module, name in _CLASSES.items():
            when_imported(module, partial(_note, name))


def _note(name: str, module: ModuleType) -> None:
    for cls in vars(module)[name].__mro__[:-1]:
        methods = {it: value for it, value in vars(cls).items() if it not in _DUNDERS and callable(getattr(cls, it))}
        _originals.setdefault(cls, methods)


def classes_of_trl() -> dict[type, dict[str, Any]]:
    """TRL's trainer and the classes below it, each with the methods that it had before the setup file."""
    import trl.trainer.grpo_trainer  # noqa: F401  # there is a trainer, so it has been imported

    note_originals()
    return _originals


def replaced(trainer: Any) -> dict[str, Any]:
    """What stands in the place of TRL's methods for this trainer, by name: the outermost where several do."""
    found = {name: value for _, name, value in replaced_at(trainer)}
    return {name: value for name, value in found.items() if callable(bare(value)) and _users(value)}


def replaced_at(trainer: Any) -> Iterator[tuple[Any, str, Any]]:
    """Where something stands in the place of TRL's methods: the owner, the name, the value; the outermost last."""
    methods = {name for own in classes_of_trl().values() for name in own}
    for owner in (*reversed(type(trainer).__mro__), trainer):
        own = vars(owner) if owner is trainer or not _is_known(owner) else patched_in(owner)
        yield from [(owner, name, own[name]) for name in own if name in methods]


def replaced_by_user(trainer: Any) -> set[str]:
    """The names of those that are not of a class which declares its algorithm, as `TurnGRPOTrainer` does."""
    declared = {id(value) for cls in type(trainer).__mro__ if declares(cls) for value in vars(cls).values()}
    return {name for name, it in replaced(trainer).items() if id(it) not in declared}


def patched(trainer: Any) -> set[str]:
    """The methods that were replaced on TRL's classes themselves, by assignment."""
    return {name for cls in type(trainer).__mro__ for name in patched_in(cls)}


def patched_in(cls: Any) -> dict[str, Any]:
    """What the user's code put into this class in the place of methods of TRL's; nothing for other classes."""
    now, before = vars(cls), classes_of_trl().get(cls, {})
    return {
        name: now[name] for name in before.keys() & now.keys() if now[name] is not before[name] and _users(now[name])
    }


def patched_here() -> list[str]:
    """The methods of TRL's trainer that code of this process has replaced, where nobody has noted what they were."""
    module = sys.modules.get("trl.trainer.grpo_trainer")
    classes = vars(module)["GRPOTrainer"].__mro__[:-1] if module is not None else ()
    methods = {name: value for cls in classes for name, value in vars(cls).items() if name not in _DUNDERS}
    return sorted(name for name, it in methods.items() if callable(bare(it)) and not of_libraries(it))


def of_libraries(function: Any) -> bool:
    """Whether a function, and what it wraps, is of the packages that a trainer is made of."""
    while function is not None:
        function = bare(function)
        if not _module(function).startswith(_LIBRARIES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def is_of_ours(function: Any) -> bool:
    """Whether a function is of a class of this package, which a setup file names and has not written."""
    return _module(bare(function)).startswith("async_grpo.")


def class_of_trl(trainer: Any) -> Any:
    """The class of TRL's that the user's derive from."""
    known = classes_of_trl()
    return next(cls for cls in type(trainer).__mro__ if cls in known or _is_equivalent(cls.__module__))


def original(cls: Any, name: str) -> Any:
    """A method as this class of TRL's had it, whatever it has now."""
    known = classes_of_trl()
    base = next(base for base in cls.__mro__ if name in vars(base) or name in known.get(base, {}))
    return known[base][name] if name in patched_in(base) else vars(base)[name]


def naming_arguments(cls: Any) -> Callable[..., dict[str, Any]]:
    """What names the arguments of TRL's constructor, also where a patch of it takes anything and passes it on."""
    signature = inspect.signature(original(cls, "__init__"))

    def named(*args: Any, **kwargs: Any) -> dict[str, Any]:
        known = {name: value for name, value in kwargs.items() if name in signature.parameters}
        return signature.bind_partial(*args, **known).arguments

    return named


@contextmanager
def instead(owner: Any, **values: Any) -> Iterator[None]:
    """Inside this block, these attributes of a class or module have other values."""
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def users_class(trainer: Any) -> str:
    """The name of the trainer's class as the user has it."""
    return next(cls.__name__ for cls in type(trainer).__mro__ if cls not in _adapters)


def bare(value: Any) -> Any:
    """The function of a method, a static method or a `partial`."""
    while inner := getattr(value, "__func__", None) or (value.func if isinstance(value, partial) else None):
        value = inner
    return value


def _users(value: Any) -> bool:
    """Whether a function is not of a package that does what TRL does."""
    return not _is_equivalent(_module(bare(value)))


def _module(function: Any) -> str:
    """Where the code of a function is; `__module__` is copied to what wraps it."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _is_known(cls: Any) -> bool:
    """Whether a class is TRL's, or one that the user has no hand in."""
    return cls in _originals or cls is object or cls in _adapters or _is_equivalent(cls.__module__)


def _is_equivalent(module: str) -> bool:
    return module.lower().startswith(_EQUIVALENT)
