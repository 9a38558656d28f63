"""A get_trainer that is in no file: a function reaches the processes of a run, or is refused with the reason."""

from __future__ import annotations

import functools
import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from async_grpo.api.trainer import setup_of
from async_grpo.errors import SetupFileError, UsageError
from async_grpo.setup.generated import sent_function
from async_grpo.setup.generated.sent_function import VARIABLE, in_memory, pass_on, pickled, received
from async_grpo.setup.setup_file import check_setup_file

SRC = str(Path(__file__).parents[3] / "src")
NOTEBOOK = """
import json, math, os, subprocess, sys
from fractions import Fraction

from async_grpo.api.trainer import setup_of
from async_grpo.setup.generated.sent_function import VARIABLE, in_memory, pass_on

SCALE = {"of a cell": [2, Fraction(1, 2)]}

class Base:
    def __init__(self, value): self.value = value

class Made(Base):
    def __init__(self, value):
        super().__init__(value * SCALE["of a cell"][0])

def helper(value, times=3):
    return helper(value, times - 1) if times else Made(value)

def around(closed_over):
    def build():
        return f"{type(helper(closed_over)).__name__} {math.floor(helper(closed_over).value)} {SCALE}"
    return build

build = around(4)
setup = setup_of(build)
os.environ[VARIABLE] = str(in_memory(setup.payload))
pass_on(os.environ)
code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['get_trainer']())"
again = [sys.executable, "-c", code, str(setup.file)]
print([subprocess.run(again, capture_output=True, text=True).stdout for start in range(2)])
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "cache"


def defined(text: str, **names: object) -> Any:
    """`build`, as a session defines it in which these names exist."""
    names["__name__"] = "__main__"
    exec(compile(text, "<cell>", "exec"), names)
    return names["build"]


def test_a_function_with_all_that_it_uses_reaches_each_process(tmp_path: Path) -> None:
    env = {"PYTHONPATH": SRC, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    line = "Made 8 {'of a cell': [2, Fraction(1, 2)]}\n"
    assert (said.stdout, said.stderr) == (f"{[line, line]}\n", "")


def test_a_script_without_a_guard_is_not_started_again(tmp_path: Path) -> None:
    script = tmp_path / "my_script.py"
    script.write_text(
        "from async_grpo.api.trainer import setup_of\ndef build(): ...\nprint(setup_of(build).payload is not None)"
    )
    env = {"PYTHONPATH": SRC, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
    assert (said.stdout, said.stderr) == ("True\n", "")


class MyTrainer: ...


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ((row for row in ()), r"build uses it \(generator\), which cannot be sent.*Make it inside the function"),
        (MyTrainer(), "build uses it, which is a trainer, not a function. Make it inside the function"),
        (b"x" * 2**20, "build takes 1 MB with it, 1 MB of it is it; at most 0 MB are sent. Make it inside"),
    ],
)
def test_what_cannot_be_sent_is_named(value: object, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_function, "MOST_BYTES", 2**19)
    with pytest.raises(SetupFileError, match=why):
        setup_of(defined("def build(): return it", it=value))


def test_without_its_sender_the_setup_file_says_what_it_needs() -> None:
    with pytest.raises(SetupFileError, match=r"To continue the run: AsyncGRPO\(build, resume=True, run_dir=…\).train"):
        received("build")


def refuses_to_unpickle(given: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(given))
    with pytest.raises(SetupFileError, match="is in no file"):
        received("build")


def test_a_file_is_never_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours").write_bytes(b"{}\n" + pickle.dumps(Touches(tmp_path / "touched")))
    refuses_to_unpickle(tmp_path / "ours", monkeypatch)
    unsealed = os.memfd_create("another")
    monkeypatch.setenv(VARIABLE, str(unsealed))
    pass_on(os.environ)
    refuses_to_unpickle(os.environ[VARIABLE], monkeypatch)
    os.close(unsealed)
    assert not (tmp_path / "touched").exists()


def test_neither_a_named_pipe_nor_the_memory_of_another_user_is_waited_for_or_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    refuses_to_unpickle(tmp_path / "pipe", monkeypatch)
    descriptor = in_memory(b"{}\n" + pickle.dumps(Touches(tmp_path / "touched")))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refuses_to_unpickle(f"/proc/self/fd/{descriptor}", monkeypatch)
    os.close(descriptor)
    assert not (tmp_path / "touched").exists()


def test_a_system_that_seals_more_and_a_path_that_python_passes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("nowhere")])
    with monkeypatch.context() as with_more:  # as vm.memfd_noexec=1 adds a seal
        with_more.setattr(sent_function, "_SEALS", sent_function._SEALS | 0x10)  # F_SEAL_FUTURE_WRITE
        descriptor = in_memory(pickled(defined("def build(): return 3")))
    monkeypatch.setenv(VARIABLE, f"/proc/self/fd/{descriptor}")
    try:
        assert received("build")() == 3
    finally:
        os.close(descriptor)


class Touches:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_a_module_that_the_process_cannot_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_session.py").write_text("VALUE = 3")
    monkeypatch.syspath_prepend(str(tmp_path))
    descriptor = in_memory(pickled(defined("import of_the_session\ndef build(): return of_the_session.VALUE")))
    monkeypatch.setenv(VARIABLE, f"/proc/self/fd/{descriptor}")
    monkeypatch.delitem(sys.modules, "of_the_session")
    sys.path.remove(str(tmp_path))
    try:
        assert received("build")() == 3, "its folder comes along"
        monkeypatch.delitem(sys.modules, "of_the_session")
        (tmp_path / "of_the_session.py").unlink()
        with pytest.raises(SetupFileError, match=r"build was sent to this process, which cannot import"):
            received("build")
    finally:
        os.close(descriptor)


# --- What may be given as get_trainer, and the reason for what may not -------------------------------------------

LOADS = "import importlib.util, sys; s = importlib.util.spec_from_file_location('x', sys.argv[1]); "
LOADS += "m = importlib.util.module_from_spec(s); s.loader.exec_module(m); print(m.get_trainer())"


def made() -> str:
    return "made here"


class GRPOTrainer: ...


class TheirTrainer(GRPOTrainer): ...


def loaded_elsewhere(path: Path, folder: Path) -> str:
    """What get_trainer() of a setup file returns in another process."""
    check_setup_file(path)
    command = [sys.executable, "-c", LOADS, str(path)]
    child = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert child.returncode == 0, child.stderr
    return child.stdout.strip()


def test_a_path_is_the_setup_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def get_trainer(): ...")
    monkeypatch.chdir(tmp_path)
    assert setup_of("mine.py") == setup_of(Path("mine.py")) == (tmp_path / "mine.py", None)


def test_a_yaml_file_of_trl_is_read_and_changes_nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: m\nenv: {OF_A_YAML_FILE: 1}")
    assert setup_of(tmp_path / "grpo.yaml") == (tmp_path / "grpo.yaml", None)
    assert "OF_A_YAML_FILE" not in os.environ
    (tmp_path / "grpo.yaml").write_text("- m")
    with pytest.raises(UsageError, match="must contain a YAML mapping"):
        setup_of(tmp_path / "grpo.yaml")


def test_a_function_of_a_module_reaches_another_process(tmp_path: Path) -> None:
    package = tmp_path / "somebodys"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "inner" / "__init__.py").write_text("def other(): return 'of a package'")
    (package / "model.py").write_text("def build(): return 'of a module'")
    sys.path.insert(0, str(tmp_path))
    try:
        import somebodys.model  # type: ignore[import-not-found]

        files = [setup_of("somebodys.model:build").file, setup_of(somebodys.model.build).file]
        assert files[0] == files[1], "a resume finds the same file"
        assert loaded_elsewhere(files[0], Path("/")) == "of a module"
        assert loaded_elsewhere(setup_of("somebodys.inner:other").file, Path("/")) == "of a package"
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("module_run", [False, True])
def test_a_function_of_the_main_script_reaches_another_process(module_run: bool, tmp_path: Path) -> None:
    script = "from async_grpo.api.trainer import setup_of\ndef build(): return 'of a script'\n"
    (tmp_path / "my_script.py").write_text(script + "if __name__ == '__main__': print(setup_of(build).file)\n")
    command = [sys.executable, *(["-m", "my_script"] if module_run else ["my_script.py"])]
    env = {"PYTHONPATH": SRC, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert loaded_elsewhere(Path(said.stdout.strip()), Path("/")) == "of a script"


@pytest.mark.parametrize(
    ("given", "why", "way_out"),
    [
        (lambda: None, "lambda", "Define a function with `def`"),
        (functools.partial(made), "got partial", "Define a function with `def`"),
        (GRPOTrainer(), "a trainer cannot be sent", "Pass the function that makes it"),
        (TheirTrainer(), "a trainer cannot be sent", "Pass the function that makes it"),
        (GRPOTrainer, "got type", "Define a function"),
        ("nowhere.py", "Setup file not found", "Give the path"),
        (f"{__file__}:made", "names a function of a file", "Give the file alone"),
        ("no.such_module:build", "no.such_module", "Is its folder in sys.path?"),
        ("sys:exit", "There is no module sys", "sys.path"),
        ("a b:c", "must be package.module:function", ""),
    ],
)
def test_what_cannot_reach_the_processes_is_refused(given: Any, why: str, way_out: str) -> None:
    with pytest.raises(SetupFileError) as error:
        setup_of(given)
    assert why in str(error.value) and way_out in str(error.value)


def test_a_process_of_a_run_does_not_start_the_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__main__")
    main.__spec__ = importlib.util.spec_from_loader("async_grpo.cli.__main__", None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setitem(sys.modules, "async_grpo_setup_file", ModuleType("async_grpo_setup_file"))
    with pytest.raises(SetupFileError, match="under `if __name__ == '__main__':`"):
        setup_of(made)
