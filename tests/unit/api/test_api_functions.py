"""What may be given as get_trainer, and the reason for what may not."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from async_grpo.api.trainer import setup_of
from async_grpo.errors import SetupFileError, UsageError
from async_grpo.setup.setup_file import check_setup_file

SRC = str(Path(__file__).parents[3] / "src")
LOADS = "import importlib.util, sys; s = importlib.util.spec_from_file_location('x', sys.argv[1]); "
LOADS += "m = importlib.util.module_from_spec(s); s.loader.exec_module(m); print(m.get_trainer())"


def made() -> str:
    return "made here"


class GRPOTrainer: ...


class MyTrainer(GRPOTrainer): ...


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def loaded_elsewhere(path: Path, folder: Path) -> str:
    """What get_trainer() of a setup file returns in another process."""
    check_setup_file(path)
    child = subprocess.run(
        [sys.executable, "-c", LOADS, str(path)], cwd=folder, capture_output=True, text=True, timeout=60
    )
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
        (MyTrainer(), "a trainer cannot be sent", "Pass the function that makes it"),
        (GRPOTrainer, "got type", "Define a function"),
        (None, "got NoneType", "Define a function"),
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
