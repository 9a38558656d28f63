"""Everything that can be wrong with a setup file, and what its author is told."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from async_grpo.errors import SetupFileError
from async_grpo.setup import trl_compat
from async_grpo.setup.generated import GENERATED
from async_grpo.setup.setup_file import MODULE_NAME, check_setup_file, load_trainer


class FakeTrainer:
    """In place of `trl.GRPOTrainer`, whose import takes longer than all of these tests."""


@pytest.fixture(autouse=True)
def fake_trl(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    trl = types.ModuleType("trl")
    trl.GRPOTrainer = FakeTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trl", trl)
    monkeypatch.setattr(sys, "path", list(sys.path))
    repaired: list[bool] = []
    monkeypatch.setattr(trl_compat, "repair_trl", lambda: repaired.append(True))
    yield repaired
    sys.modules.pop(MODULE_NAME, None)


def write(folder: Path, text: str, name: str = "my_trainer.py") -> Path:
    path = folder / name
    path.write_text(dedent(text))
    return path


GOOD = """
    from trl import GRPOTrainer

    def get_trainer():
        return GRPOTrainer()
"""


def test_a_good_file(tmp_path: Path, fake_trl: list[bool]) -> None:
    assert isinstance(load_trainer(write(tmp_path, GOOD)), FakeTrainer)
    assert fake_trl == [True], "TRL is made fit for this machine"


@pytest.mark.parametrize("name", ["missing.py", "."])
def test_no_such_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(SetupFileError, match=r"Setup file not found: .*\n.*get_trainer\(\)"):
        check_setup_file(tmp_path / name)


def test_a_function_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(SetupFileError, match=r"names a function of a file\. Give the file alone"):
        check_setup_file(Path(f"{write(tmp_path, GOOD)}:build"))


@pytest.mark.parametrize(
    "content", [b"def get_trainer(:\n", b"\xff\xfe\x00", b"def get_trainer(): pass\n\x00", b"%PDF-1.4"]
)
def test_no_python(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.py"
    path.write_bytes(content)
    with pytest.raises(SetupFileError, match=r"broken\.py is not valid Python: "):
        check_setup_file(path)


@pytest.mark.parametrize(
    "content", ["", "x = 1", "def make_trainer(): pass", "class A:\n    def get_trainer(self): pass"]
)
def test_no_get_trainer(tmp_path: Path, content: str) -> None:
    with pytest.raises(SetupFileError, match=r"defines no get_trainer\(\).*returns a trl.GRPOTrainer"):
        check_setup_file(write(tmp_path, content))


@pytest.mark.parametrize(
    "content",
    [
        "def get_trainer(): ...",
        "raise RuntimeError\ndef get_trainer(): ...",
        "from elsewhere import get_trainer",
        "from elsewhere import make as get_trainer",
        "from elsewhere import *",
        "get_trainer = make(seed=1)",
        "get_trainer: Callable[[], object] = make(seed=1)",
        "if True:\n    def get_trainer(): ...",
        "try:\n    from a import get_trainer\nexcept ImportError:\n    pass",
        "try:\n    import a\nexcept ImportError:\n    def get_trainer(): ...",
    ],
)
def test_every_way_to_define_it_is_recognised_without_running_the_file(tmp_path: Path, content: str) -> None:
    check_setup_file(write(tmp_path, content))


NOT_ONE = r"get_trainer\(\) in .* must return a trl.GRPOTrainer, but .*"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("from empty_neighbour import *", "get_trainer in .* is not a function but NoneType"),
        ("def get_trainer(): return None", NOT_ONE + r"returned None \(is a `return` missing\?\)"),
        ("def get_trainer(): return 3", NOT_ONE + "returned a builtins.int"),
        ("def get_trainer(): return {}", NOT_ONE + "builtins.dict"),
        ("def get_trainer(model): ...", r"failed:\n(.|\n)*missing 1 required positional argument: 'model'"),
        (
            "import no_such_module_anywhere\ndef get_trainer(): ...",
            "ModuleNotFoundError: No module named 'no_such_module_anywhere'",
        ),
    ],
)
def test_what_makes_no_trainer(tmp_path: Path, content: str, said: str) -> None:
    write(tmp_path, "x = 1", "empty_neighbour.py")
    with pytest.raises(SetupFileError, match=said):
        load_trainer(write(tmp_path, content))


def test_a_file_that_raises_shows_its_own_frames_only(tmp_path: Path) -> None:
    path = write(tmp_path, "import json\njson.loads('{')\ndef get_trainer(): ...")
    with pytest.raises(SetupFileError) as failure:
        load_trainer(path)
    first, frame, *_, last = str(failure.value).splitlines()
    assert first == f"{path} could not be loaded:"
    assert frame == f'  File "{path}", line 2, in <module>'
    assert last.startswith("json.decoder.JSONDecodeError: ")
    assert "setup_file.py" not in str(failure.value) and "importlib" not in str(failure.value)


def test_a_get_trainer_that_raises_shows_the_user_s_frames_only(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        def helper():
            raise FileNotFoundError("no model at models/x")

        def get_trainer():
            return helper()
        """,
    )
    with pytest.raises(SetupFileError) as failure:
        load_trainer(path)
    text = str(failure.value)
    assert text.startswith(f'get_trainer() in {path} failed:\n  File "{path}", line 6, in get_trainer\n')
    assert text.endswith("FileNotFoundError: no model at models/x")
    assert "setup_file.py" not in text


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_its_traceback_goes_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(
        tmp_path,
        """
        class AutoModel:
            @classmethod
            def from_pretrained(cls, pretrained_model_name_or_path):
                raise OSError("We couldn't connect to the hub.\\nCheck your connection.")

        def get_trainer():
            AutoModel.from_pretrained("nobody/no-such-model")
        """,
    )
    with pytest.raises(SetupFileError) as failure:
        load_trainer(path)
    first, second = str(failure.value).splitlines()
    assert first == (
        f"nobody/no-such-model cannot be loaded (line 5 of {path}): We couldn't connect to the hub. Check your "
        "connection."
    )
    assert "HF_TOKEN" in second and second.endswith("The traceback is in the log.")
    assert "in from_pretrained" in capsys.readouterr().err


def test_the_file_can_import_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "from trl import GRPOTrainer as Trainer", "my_neighbour.py")
    path = write(tmp_path, "def get_trainer():\n    from my_neighbour import Trainer\n    return Trainer()")
    assert isinstance(load_trainer(path), FakeTrainer)


def test_nothing_beside_a_file_that_we_wrote_is_imported(tmp_path: Path) -> None:
    write(tmp_path, "raise SystemExit", "my_other_neighbour.py")
    path = tmp_path / "written.py"
    path.write_text(GENERATED + dedent(GOOD) + "import my_other_neighbour\n")
    with pytest.raises(SetupFileError, match="No module named 'my_other_neighbour'"):
        load_trainer(path)


def test_classes_of_the_file_can_be_found_by_name(tmp_path: Path) -> None:
    """`pickle` and `typing.get_type_hints` look a class up in `sys.modules`."""
    load_trainer(write(tmp_path, GOOD + "\n    class Mine(GRPOTrainer): ...\n"))
    assert sys.modules[MODULE_NAME].Mine.__module__ == MODULE_NAME


def test_a_file_that_parses_its_command_line_reads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(
        tmp_path,
        """
        import argparse, sys

        at_import = list(sys.argv)

        def get_trainer():
            from trl import GRPOTrainer

            parser = argparse.ArgumentParser()
            parser.add_argument("--learning-rate", type=float, default=1e-6)
            trainer = GRPOTrainer()
            trainer.read = parser.parse_args().learning_rate
            trainer.seen = at_import, list(sys.argv)
            return trainer
        """,
    )
    ours = ["async-grpo", "train", str(path), "--learning-rate", "7"]
    monkeypatch.setattr(sys, "argv", ours)
    trainer: Any = load_trainer(path)
    assert trainer.read == 1e-6
    assert trainer.seen == ([str(path)], [str(path)])
    assert sys.argv is ours
