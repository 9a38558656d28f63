import subprocess
import sys

import pytest

from async_grpo_ipc import open_remote_memory
from async_grpo_ipc.__main__ import main


def test_inspect_shows_slots_sizes_versions_and_holders(exporter, handle, capsys):
    exporter.publish(6)
    exporter.publish(7)
    with open_remote_memory(handle) as remote, remote.lease():
        assert main(["inspect", str(handle), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert exporter.generation in shown
    assert "exporter: alive" in shown
    assert "READY version 7" in shown and "(newest), held by pid" in shown
    assert "bfloat16: 1 tensors" in shown
    assert "embed.weight" in shown


def test_inspect_of_a_dead_exporter_says_so(exporter, handle, capsys):
    raw = handle.read_bytes()
    exporter.close()
    handle.write_bytes(raw)
    assert main(["inspect", str(handle)]) == 0
    assert "has ended" in capsys.readouterr().out


def test_check_attaches_and_measures(exporter, handle, capsys):
    assert main(["check", str(handle)]) == 1
    assert "no version can be read now: slot 0 EMPTY" in capsys.readouterr().out
    exporter.publish(7)
    assert main(["check", str(handle)]) == 0
    shown = capsys.readouterr().out
    assert "canary is whole" in shown and "version 7 in slot" in shown and "GB/s" in shown
    assert "a model on cpu can alias it" in shown


@pytest.mark.parametrize("command", ["inspect", "check"])
def test_errors_are_sentences(handle, capsys, command):
    assert main([command, str(handle)]) == 1
    assert "error: " in capsys.readouterr().err


def test_help_imports_no_torch():
    code = (
        "import sys, runpy; sys.argv = ['x', '--help']\ntry: runpy.run_module('async_grpo_ipc', run_name='__main__')\n"
    )
    code += "except SystemExit: pass\nprint('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.splitlines()[-1] == "False"


def test_looking_at_slots_imports_no_torch(exporter, handle):
    exporter.publish(3)
    code = (
        "import sys; from pathlib import Path; from async_grpo_ipc.report import look_at_slots\n"
        f"print(max(slot.version for slot in look_at_slots(Path({str(handle)!r}), [])), 'torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout.split() == ["3", "False"]
