"""Ctrl-C in the first moments of a command, which are imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from async_grpo.cli import main

SRC = Path(__file__).resolve().parents[3] / "src"


def test_next_to_nothing_is_imported_before_ctrl_c_is_handled() -> None:
    """Until `main` is called, a signal is a traceback from the middle of an import."""
    code = "import sys, os, io, errno; was = set(sys.modules); import async_grpo.cli; print(*sys.modules.keys() - was)"
    command = [sys.executable, "-S", "-c", code]  # without site, which imports what is installed beside us
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    loaded = subprocess.run(command, capture_output=True, text=True, env=env, check=True, timeout=60)
    ours = {"async_grpo", "async_grpo.cli", "async_grpo.errors", "async_grpo.version", "__future__"}
    assert set(loaded.stdout.split()) <= ours


def test_ctrl_c_while_plain_trl_loads_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (setup := tmp_path / "my_trainer.py").write_text("def get_trainer(): ...")
    monkeypatch.setattr("async_grpo.setup.devices._compute_modes", lambda visible: [])
    monkeypatch.setattr("async_grpo.setup.process.set_up_log", lambda level, rank=0: None)
    monkeypatch.setattr("async_grpo.setup.setup_file.load_trainer", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["train", str(setup), "--device", "cpu"]) == 130
    assert capsys.readouterr().err == "stopped, nothing was trained\n"


@pytest.mark.parametrize("module", ["async_grpo.cli.compute.train", "argparse"])
def test_ctrl_c_while_the_command_is_imported_is_no_traceback(module: str, tmp_path: Path) -> None:
    """The first moments of a command are imports: a signal that arrives in them raises there."""
    stop = (
        "import signal, sys, importlib.abc\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # tests in the background ignore it
        "class Stop(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "from async_grpo.cli import main\n"
        "sys.modules.pop('argparse', None)\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.exit(main(['train', '--help']))"
    )
    ended = subprocess.run([sys.executable, "-c", stop], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")
