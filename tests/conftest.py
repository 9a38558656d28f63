"""One core a test process: the machine that runs the tests may have no more than two."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
