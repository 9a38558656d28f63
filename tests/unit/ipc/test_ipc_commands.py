import subprocess
import sys
from pathlib import Path

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


def test_inspect_of_a_dead_exporter_says_so(published, handle, capsys):
    raw = handle.read_bytes()
    published.close()
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


# ---  ------------------------------------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[3] / "examples" / "share_weights.py"


@pytest.mark.integration
def test_the_example_shares_weights_between_two_processes(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) < 60
    runner = subprocess.Popen([sys.executable, EXAMPLE, "run"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    code = f"import runpy; runpy.run_path({str(EXAMPLE)!r})['train'](steps=100)"
    trainer = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    shown, _ = runner.communicate(timeout=120)
    assert trainer.returncode == 0, trainer.stderr
    assert "trained 100 steps" in trainer.stdout
    assert runner.returncode == 0 or not shown  # a reader that started after the trainer's end finds no exporter
