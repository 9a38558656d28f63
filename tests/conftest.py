"""What holds for every test: one core a process, and a garbage collector that leaves the imported modules alone.

Collecting imports torch, transformers and TRL: a million objects. Each full collection, of which every training calls
one, would take a second to look at them again.
"""

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the machine that runs the tests may have no more than two cores
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
