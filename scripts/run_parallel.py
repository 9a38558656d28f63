"""`python scripts/run_parallel.py KEY=VALUE …`: the same as `async-grpo experiment KEY=VALUE …`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from async_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["experiment", *sys.argv[1:]]))
