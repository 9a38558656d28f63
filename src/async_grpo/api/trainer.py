"""`AsyncGRPO`: a distributed run, from Python; and what its processes load `get_trainer` from.

Every process of a run needs the function. One of a module, or of a script that may be imported, is imported: the setup
file is that import. One of neither, as in a notebook, is sent (`setup.generated.sent_function`).
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple, Unpack

from async_grpo.api.notebook import Panel, in_notebook
from async_grpo.api.options import Options, as_flags
from async_grpo.api.result import Result
from async_grpo.api.run_handle import POLL_S, START_TIMEOUT_S, CommandChild, Found, Handle
from async_grpo.errors import SetupFileError, UsageError, WaitTimeoutError
from async_grpo.rundir.folders import require_text
from async_grpo.rundir.lifecycle import preview
from async_grpo.rundir.paths import RunDir
from async_grpo.setup.generated import write_setup_file
from async_grpo.setup.generated.sent_function import pickled, setup_file_for
from async_grpo.setup.generated.trl_command import contents, is_yaml
from async_grpo.setup.replaced import patched_here
from async_grpo.setup.setup_file import MODULE_NAME, check_setup_file

IN_A_FILE = "Define a function with `def` that returns the trainer, and pass it: AsyncGRPO(build)."
_IMPORT = '''"""The setup file that AsyncGRPO wrote for {module}:{function}."""

import sys

if {root!r} not in sys.path:
    sys.path.insert(0, {root!r})

from {module} import {function} as get_trainer  # noqa: F401
'''


class AsyncGRPO:
    """A run of `async-grpo train --distributed`: a parameter server and workers, each a process of its own.

    Args:
        get_trainer: the path of a setup file, `"package.module:function"`, or a function, also one of a notebook. Each
            process of the run calls it; it returns a `trl.GRPOTrainer`. The path may be that of a YAML file of TRL.
        workers: rollout workers; by default one for each GPU besides the server's, and 2 on a CPU.
        run_dir: queue, logs and metrics of the run.
        options: the options of the command line, each a keyword of the same name.

    Raises:
        AsyncGRPOError: an argument cannot be used; what, why, and what to do.

    Example:
        >>> result = AsyncGRPO("my_trainer.py", workers=2, max_staleness=4).train()
        >>> result.metrics["reward"]
    """

    def __init__(
        self,
        get_trainer: str | os.PathLike[str] | Callable[[], Any],
        *,
        workers: int | None = None,
        run_dir: str | os.PathLike[str] = "worker",
        **options: Unpack[Options],
    ) -> None:
        if workers is not None and options.get("num_workers") is not None:
            raise UsageError("workers and num_workers are the same option: give one of them.")
        self._resume, self._overwrite = options.get("resume", False), options.get("overwrite", False)
        if self._resume and self._overwrite:
            raise UsageError("resume and overwrite exclude each other: continue the unfinished run, or delete it.")
        self.run_dir = _folder(run_dir)
        self._has_panel = in_notebook() and "quiet" not in options
        if self._has_panel:
            options["quiet"] = True
        count: Options = {} if workers is None else {"num_workers": workers}
        self._flags = as_flags({**options, **count})
        self.setup_file, self._payload = setup_of(get_trainer)
        self._started = False

    def train(self) -> Result:
        """Train to the end, and show what the command shows. Ctrl-C ends the run with a checkpoint."""
        with self.start() as handle:
            return handle.result()

    def start(self) -> Handle:
        """Start the run and return at once. It goes on when this process ends; `attach` finds it.

        Raises:
            RunDirError: a run is alive in the directory, or it holds an unfinished one.
            UsageError: this object has started its run before, or the command refuses its options.
        """
        if self._started:
            raise UsageError(
                "This AsyncGRPO has started its run already. Make another for another run; with resume=True and "
                "more steps it trains on."
            )
        preview(self.run_dir, resume=self._resume, overwrite=self._overwrite)
        self._started = True
        before = RunDir(self.run_dir).read_state()
        command = ["train", str(self.setup_file), "--distributed", f"--run-dir={self.run_dir}", *self._flags]
        child = CommandChild(command, self._payload, only_errors=self._has_panel)
        handle = Handle(self.run_dir, child, panel=Panel(self.run_dir) if self._has_panel else None)
        try:
            self._await_beginning(child, before.run_id if before else "")
        except BaseException:
            handle.stop()
            raise
        return handle

    @staticmethod
    def attach(run_dir: str | os.PathLike[str] = "worker") -> Handle:
        """The run in a directory, live or not, whoever started it: after a restart of a notebook's kernel, say."""
        path = _folder(run_dir)
        return Handle(path, Found(path), panel=Panel(path) if in_notebook() else None)

    def _await_beginning(self, child: CommandChild, earlier: str) -> None:
        """Return when the directory is this run's. Raises what ended the launcher before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not child.is_over():
            state = RunDir(self.run_dir).read_state()
            if state is not None and (self._resume or state.run_id != earlier):
                return
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"The launcher has not begun the run in {self.run_dir} within {START_TIMEOUT_S:g} s."
                )
            time.sleep(POLL_S)
        error = child.error()
        if error is not None:
            raise error


def _folder(run_dir: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(run_dir).expanduser().absolute()
        require_text(str(folder))
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a home directory that there is not
        raise UsageError(f"run_dir={run_dir!r} cannot be: {error}.") from error
    return folder


class Setup(NamedTuple):
    """What a run is started with."""

    file: Path
    payload: bytes | None = None  # the function, where it is sent; None: the file has all


def setup_of(get_trainer: str | os.PathLike[str] | Callable[[], Any]) -> Setup:
    """The setup file for a path, `"package.module:function"`, or a function; and the function, where it is in no file.

    Raises:
        SetupFileError: it is none of these, or cannot reach other processes, with the reason and the way out.
    """
    if MODULE_NAME in sys.modules and _is_ours(sys.modules["__main__"]):
        raise SetupFileError(
            "A process of a run has imported the file that starts the run, and would start it again. Put the lines "
            "that use AsyncGRPO under `if __name__ == '__main__':`."
        )
    if isinstance(get_trainer, (str, os.PathLike)):
        try:
            require_text(text := str(os.fspath(get_trainer)))
        except ValueError as error:
            raise SetupFileError(f"{get_trainer!r} cannot name a setup file: {error}.") from error
        return Setup(_named(text))
    if not isinstance(get_trainer, FunctionType):
        raise SetupFileError(_not_a_function(get_trainer))
    if get_trainer.__name__ == "<lambda>":
        raise SetupFileError(f"get_trainer is a lambda, which has no name to be found by. {IN_A_FILE}")
    module = _module_of(get_trainer)
    if module is not None:
        return Setup(_importing(module, get_trainer.__name__))
    if patched := patched_here():
        raise SetupFileError(
            f"{patched[0]} of TRL's trainer was patched in this process, and the processes of the run get the function "
            f"{get_trainer.__name__} alone. Patch it inside of {get_trainer.__name__}, or override it in a subclass."
        )
    return Setup(setup_file_for(get_trainer), pickled(get_trainer))


def _named(text: str) -> Path:
    module, colon, function = text.partition(":")
    if colon and "/" not in text and not text.endswith(".py") and not module.endswith(".py"):
        return _importing(module, function)
    path = Path(text).expanduser().absolute()
    if is_yaml(path):
        contents(path)  # refuses what the command would
    else:
        check_setup_file(path)
    return path


def _is_ours(main: Any) -> bool:
    """Whether this process is one of a run."""
    return str(getattr(getattr(main, "__spec__", None), "name", "")).startswith("async_grpo.")


def _module_of(function: FunctionType) -> str | None:
    """The module that other processes can import the function from; None: there is none."""
    name, module = function.__qualname__, function.__module__
    if getattr(sys.modules.get(module), name, None) is not function:  # made inside another function, or replaced
        return None
    return _script(function) if module == "__main__" else module


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


def _script(function: FunctionType) -> str | None:
    """The name under which other processes import what this process runs as its main program, if they can."""
    main: Any = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "")
    if Path(function.__code__.co_filename).absolute() != file.absolute() or not _may_be_imported(file):
        return None
    if getattr(main, "__spec__", None) is not None:  # python -m package.module
        return str(main.__spec__.name)
    return file.stem if file.stem.isidentifier() else None


def _may_be_imported(script: Path) -> bool:
    """Whether it says what only the main program is to do: `if __name__ == "__main__":`."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any(isinstance(test, ast.Compare) and ast.unparse(test.left) == "__name__" for test in tests)


def _importing(module: str, function: str) -> Path:
    if not function.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise SetupFileError(f"'{module}:{function}' must be package.module:function.")
    text = _IMPORT.format(module=module, function=function, root=str(_root_of(module)))
    return write_setup_file("setup", text)


def _root_of(module: str) -> Path:
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file and Path(file).stem == module:
        return Path(file).absolute().parent
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError) as error:
        raise SetupFileError(f"{module} cannot be imported: {error}. Is its folder in sys.path?") from error
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        raise SetupFileError(
            f"There is no module {module} that other processes could import. Is its folder in sys.path?"
        )
    package = spec.origin if spec.submodule_search_locations is None else Path(spec.origin).parent
    return Path(package).absolute().parents[module.count(".")]
