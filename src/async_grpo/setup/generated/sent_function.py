"""A function that is in no file, such as one of a notebook, on its way to the processes of a run.

The process that calls `AsyncGRPO` pickles it into sealed anonymous memory (memfd_create(2)). The launcher inherits the
memory, and each of its processes, also one that is started again, opens it by the launcher's pid. No file ever has it:
`received` unpickles nothing but sealed memory.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import linecache
import os
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from async_grpo.errors import SetupFileError
from async_grpo.setup.generated import write_setup_file

VARIABLE = "ASYNC_GRPO_FUNCTION"  # of the environment: the launcher's descriptor; for its processes, where it is
MOST_BYTES = 64 * 2**20
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_TEXT = '''"""The setup file that AsyncGRPO wrote for {name}(), which the process that called AsyncGRPO sends."""

from async_grpo.setup.generated.sent_function import received

get_trainer = received({name!r})
'''
_WAY_OUT = "Make it inside the function: each process of the run calls the function, and makes its own."


def setup_file_for(function: FunctionType) -> Path:
    """The setup file of a run whose function is sent."""
    return write_setup_file("sent", _TEXT.format(name=function.__name__))


def pickled(function: FunctionType) -> bytes:
    """The function with everything of this process that it uses: globals, cells, and the functions that it calls.

    Raises:
        SetupFileError: something of it cannot be sent, by name, with the reason and the way out.
    """
    used = {name: value for name, value in _used(function).items() if not isinstance(value, ModuleType)}
    for name, value in used.items():
        if any(kind.__name__.endswith("Trainer") for kind in type(value).__mro__):
            raise SetupFileError(f"{function.__name__} uses {name}, which is a trainer, not a function. {_WAY_OUT}")
    try:
        body = _dumps(function)
    except Exception as error:  # whatever the user's objects raise
        raise SetupFileError(_unsendable(function, used, error)) from error
    if len(body) > MOST_BYTES:
        sizes = {name: len(_dumps(value)) for name, value in used.items()}
        largest = max(sizes, key=lambda name: sizes[name], default="")
        of_what = f", {sizes[largest] / 2**20:.0f} MB of it is {largest}" if largest else ""
        raise SetupFileError(
            f"{function.__name__} takes {len(body) / 2**20:.0f} MB with it{of_what}; at most "
            f"{MOST_BYTES // 2**20} MB are sent. {_WAY_OUT}"
        )
    head = {"path": [folder for folder in sys.path if isinstance(folder, str)], "sources": _sources()}
    return json.dumps(head).encode() + b"\n" + body


def _used(function: FunctionType) -> dict[str, Any]:
    found = inspect.getclosurevars(function)
    return {**found.globals, **found.nonlocals}


def _dumps(value: object) -> bytes:
    import dill

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dill.PicklingWarning)
        return bytes(dill.dumps(value, recurse=True, byref=False))


def _unsendable(function: FunctionType, used: Mapping[str, Any], error: Exception) -> str:
    """Which of the values that the function uses cannot be pickled."""
    for name, value in used.items():
        try:
            _dumps(value)
        except Exception as reason:  # noqa: BLE001  # whatever the user's objects raise
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            what = f"{function.__name__} uses {name} ({kind})"
            return f"{what}, which cannot be sent to other processes: {reason}. {_WAY_OUT}"
    return f"{function.__name__} cannot be sent to other processes: {error}. {_WAY_OUT}"


def _sources() -> dict[str, str]:
    """The text of this session's cells, which are in no file: tracebacks of the run's processes show its lines."""
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
    return {name: "".join(entry[2]) for name, entry in cells.items()}


def in_memory(payload: bytes) -> int:
    """A descriptor of sealed memory with these bytes; the caller closes it."""
    descriptor = os.memfd_create("async_grpo_function", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(os.dup(descriptor), "wb") as memory:
        memory.write(payload)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def pass_on(env: MutableMapping[str, str]) -> None:
    """In the environment of a launcher's process, name the path of what the launcher was handed as a descriptor."""
    if env.get(VARIABLE, "").isdecimal():
        env[VARIABLE] = f"/proc/{os.getpid()}/fd/{env[VARIABLE]}"


def received(name: str) -> Callable[[], Any]:
    """The function that was sent to this process.

    Raises:
        SetupFileError: none was: the process does not belong to a launcher that AsyncGRPO has started.
    """
    import dill

    head, body = _read(name)
    sys.path.extend(folder for folder in head["path"] if folder not in sys.path)
    for cell, text in head["sources"].items():
        linecache.cache[cell] = (len(text), None, text.splitlines(keepends=True), cell)
    try:
        function: Callable[[], Any] = dill.loads(body)  # noqa: S301  # sealed memory of our launcher, never a file
    except ImportError as error:
        raise SetupFileError(f"{name} was sent to this process, which cannot import what it uses: {error}") from error
    return function


def _read(name: str) -> tuple[dict[str, Any], bytes]:
    try:
        with os.fdopen(os.open(os.environ[VARIABLE], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as memory:
            if fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS != _SEALS:  # a system may add others
                raise OSError("it is not sealed memory")
            if os.fstat(memory.fileno()).st_uid != os.geteuid():  # the launcher's pid may be another's by now
                raise OSError("it is another user's")
            head, _, body = memory.read().partition(b"\n")
    except (KeyError, OSError) as error:
        raise SetupFileError(
            f"{name}() is in no file: it reaches the processes of a run only from the process that calls AsyncGRPO, "
            f"such as a notebook. To continue the run: AsyncGRPO({name}, resume=True, run_dir=…).train() there. For "
            "runs that the command line can continue, put the function into a file."
        ) from error
    return json.loads(head), body
