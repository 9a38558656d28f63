"""`make test-quick` runs what imports no torch and starts no process, and notices when that is little."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {
    "torch.py": "",
    "test_heavy_file.py": "import torch\ndef test_a(): ...\n",
    "test_a_few.py": """
import subprocess, sys, threading

def test_light():
    assert threading.active_count()

def test_heavy():
    try:
        import torch
    except Exception:
        raise AssertionError("the skip was taken for an error")

def test_process():
    subprocess.run([sys.executable, "-c", ""])

def test_process_in_a_thread_whose_end_is_not_asked_for():
    thread = threading.Thread(target=test_process)
    thread.start()
    thread.join()

def test_fork():
    import os
    try:
        os.fork()
    finally:
        assert False, "another error hides the skip"

def test_light_again():
    assert "torch" not in sys.modules
""",
}


def test_what_is_quick_is_found_and_counted(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    options = ["-p", "quick", "-p", "no:cacheprovider", "--quick", "3", "-rs"]
    command = [sys.executable, "-m", "pytest", *options, "."]
    paths = [str(tmp_path), str(Path(__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 passed, 5 skipped" in done.stdout
    assert "2 quick tests passed, and there are at least 3" in done.stdout
