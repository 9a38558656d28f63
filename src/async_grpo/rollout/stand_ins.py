"""Objects in the places of a worker's trainer that only the server's training fills: see `trl_view`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from transformers import TrainerState

COUNTED_BY_TRL_ALONE = frozenset({"tools/call_frequency", "tools/failure_frequency"})  # where it generates
COUNTED_BY_TRL = COUNTED_BY_TRL_ALONE | {  # and what the trainer side counts again
    *("num_tokens", "completions/mean_length", "completions/min_length", "completions/max_length"),
    *("completions/clipped_ratio", "completions/mean_terminated_length", "completions/min_terminated_length"),
    "completions/max_terminated_length",
}
_USES = (
    *("call", "getitem", "setitem", "delitem", "iter", "len", "contains", "enter", "exit", "int", "float", "index"),
    *("neg", "abs", "lt", "le", "gt", "ge", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *("floordiv", "rfloordiv", "mod", "rmod", "pow"),
)


class View(Protocol):
    """Says what there is at this moment, for the code that asks."""

    @property
    def added(self) -> Mapping[str, dict[str, list[float]]]:
        """By mode and name: what this code has added to `_metrics`."""

    def read(self, name: str) -> Any:
        """A field of the state. `AttributeError`: it has none of this name."""

    def whole(self) -> TrainerState:
        """The state, as an object of its own."""

    def refuse(self, what: str, why: str) -> NoReturn:
        """Raise `RunRefused`, and again when the call ends."""


class IssuedState(TrainerState):
    """`trainer.state`, and `trainer_state` of reward functions: each look is at the state of the job at hand."""

    def __init__(self, view: View) -> None:
        object.__setattr__(self, "_view", view)

    def __getattribute__(self, name: str) -> Any:
        view: View = object.__getattribute__(self, "_view")
        if name == "__class__":
            return TrainerState
        if name in TrainerState.__dataclass_fields__ or not hasattr(TrainerState, name):
            return view.read(name)
        return getattr(view.whole(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        view: View = object.__getattribute__(self, "_view")
        if name != "num_input_tokens_seen":  # TRL counts it while it generates
            view.refuse(f"trainer.state.{name} = …", "the server would not see it. Set it in a callback")

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__getattribute__(self, "_view").whole().__reduce_ex__(protocol)


class NotHere:
    """In the place of what a worker cannot have. It may be tested and compared with None, and nothing else."""

    _view: View
    _name: str
    _why: str

    def __init__(self, view: View, name: str, why: str) -> None:
        vars(self).update(_view=view, _name=name, _why=why)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._use()

    def __eq__(self, other: object) -> bool:
        return False if other is None else other is self or bool(self._use())

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True

    def __setattr__(self, *_: Any) -> None:
        self._use()

    def _use(self, *_: Any, **__: Any) -> NoReturn:
        self._view.refuse(self._name, self._why)


class MetricsToAdd:
    """`_metrics` of one mode: what is added is sent to the server, which has what was added before."""

    def __init__(self, view: View, mode: str) -> None:
        self._view, self._mode = view, mode

    def __getitem__(self, name: str) -> _Values:
        return _Values(self._view, self._mode, name)

    def setdefault(self, name: str, default: Any = None) -> _Values:
        """As a dictionary's."""
        return self[name]

    def __setitem__(self, name: str, values: Any) -> None:
        if name in COUNTED_BY_TRL:
            self._view.added[self._mode][name] = list(values)
        elif not isinstance(values, _Values):  # `+=` has added them
            self._view.refuse(f"trainer._metrics[{self._mode!r}][{name!r}] = …", "it is the server's. Append to it")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._read()

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        self._view.refuse("trainer._metrics", "what was logged is in the server. Only append to [mode][name]")

    __iter__ = __len__ = __contains__ = _read


class _Values:
    """The values of one metric."""

    def __init__(self, view: View, mode: str, name: str) -> None:
        self._view, self._mode, self._name = view, mode, name

    def append(self, value: float) -> None:
        self._view.added[self._mode][self._name].append(value)

    def extend(self, values: Any) -> None:
        self._view.added[self._mode][self._name].extend(values)

    def __iadd__(self, values: Any) -> _Values:
        self.extend(values)
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._read()

    def _read(self, *_: Any, **__: Any) -> NoReturn:
        MetricsToAdd(self._view, self._mode)._read()

    __iter__ = __len__ = __contains__ = __getitem__ = __setitem__ = __eq__ = _read
    __hash__ = object.__hash__


for _name in _USES:
    setattr(NotHere, f"__{_name}__", NotHere._use)
