"""Which file the processes of a run load `get_trainer` from.

Every process of a run imports the function by itself, so it must be in a file or a module. For a function of a module,
the setup file is one import, written into the user's cache directory under a name made of its text.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from async_grpo.errors import SetupFileError
from async_grpo.setup.generated import write_setup_file
from async_grpo.setup.generated.trl_arguments import environment, is_yaml
from async_grpo.setup.setup_file import MODULE_NAME, check_setup_file

IN_A_FILE = (
    "Put it into a file as get_trainer() and give its path: AsyncGRPO('my_trainer.py'). In a notebook, "
    "`%%writefile my_trainer.py` as the first line of the cell does that."
)

_IMPORT = '''"""The setup file that AsyncGRPO wrote for {module}:{function}."""

import sys

if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})

from {module} import {function} as get_trainer  # noqa: F401
'''


def setup_file_of(get_trainer: str | os.PathLike[str] | Callable[[], Any]) -> Path:
    """The setup file for a path, `"package.module:function"`, or a function that children can import.

    Raises:
        SetupFileError: it is none of these, with the reason and the way out.
    """
    if MODULE_NAME in sys.modules and _is_ours(sys.modules["__main__"]):
        raise SetupFileError(
            "A process of a run has imported the file that starts the run, and would start it again. Put the lines "
            "that use AsyncGRPO under `if __name__ == '__main__':`."
        )
    if isinstance(get_trainer, (str, os.PathLike)):
        text = os.fspath(get_trainer)
        module, colon, function = text.partition(":")
        if colon and "/" not in text and not text.endswith(".py"):
            return _importing(module, function)
        path = Path(text).expanduser().absolute()
        if is_yaml(path):
            environment(path)  # refuses what the command would
        else:
            check_setup_file(path)
        return path
    return _importing(*_place_of(get_trainer))


def _is_ours(main: Any) -> bool:
    """Whether this process is one of a run."""
    return str(getattr(getattr(main, "__spec__", None), "name", "")).startswith("async_grpo.")


def _place_of(function: Any) -> tuple[str, str]:
    """Module and name of a function, as another process can import it."""
    if not isinstance(function, FunctionType):
        raise SetupFileError(_not_a_function(function))
    name, module = function.__qualname__, function.__module__
    if name == "<lambda>":
        raise SetupFileError(f"get_trainer is a lambda, which no other process can import. {IN_A_FILE}")
    if "<locals>" in name:
        raise SetupFileError(f"{name} is made inside another function, and no other process can import it. {IN_A_FILE}")
    if getattr(sys.modules.get(module), name, None) is not function:
        raise SetupFileError(f"{module}.{name} is not this function, so no other process can import it. {IN_A_FILE}")
    return (_script(function), name) if module == "__main__" else (module, name)


def _not_a_function(value: Any) -> str:
    if any("Trainer" in kind.__name__ for kind in type(value).__mro__):
        return (
            f"get_trainer is a {type(value).__name__}, and a trainer cannot be sent to other processes. Pass the "
            "function that makes it: each process of the run calls it."
        )
    return (
        f"get_trainer must be a path, 'package.module:function', or a function defined with `def`, got "
        f"{type(value).__name__}. {IN_A_FILE}"
    )


def _script(function: Any) -> str:
    """The name under which other processes import what this process runs as its main program."""
    main: Any = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m package.module
        return str(main.__spec__.name)
    file = Path(getattr(main, "__file__", None) or "")
    if Path(function.__code__.co_filename).absolute() != file.absolute() or not file.stem.isidentifier():
        raise SetupFileError(
            f"{function.__name__} is defined in a notebook or an interactive session, and no other process can import "
            f"it. {IN_A_FILE}"
        )
    return file.stem


def _importing(module: str, function: str) -> Path:
    """A setup file that imports the function."""
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise SetupFileError(f"'{module}:{function}' must be package.module:function.")
    text = _IMPORT.format(module=module, function=function, root=str(_root_of(module)))
    return write_setup_file("setup", text)


def _root_of(module: str) -> Path:
    """The folder that the module is imported from."""
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file and Path(file).stem == module:
        return Path(file).absolute().parent
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SetupFileError(f"{module} cannot be imported: {error}") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise SetupFileError(
            f"There is no module {module} that other processes could import. Is its folder in sys.path?"
        )
    package = spec.origin if spec.submodule_search_locations is None else Path(spec.origin).parent
    return Path(package).absolute().parents[module.count(".")]
