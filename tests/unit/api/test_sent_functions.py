"""A function that is in no file reaches the processes of a run, or is refused with the reason."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_grpo.api.trainer import setup_of
from async_grpo.errors import SetupFileError
from async_grpo.setup.generated import sent_function
from async_grpo.setup.generated.sent_function import VARIABLE, in_memory, pass_on, pickled, received

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
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)


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
    build = defined("import of_the_session\ndef build(): return of_the_session.VALUE")
    descriptor = in_memory(pickled(build))
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
