import subprocess
import sys
from pathlib import Path

import pytest

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
