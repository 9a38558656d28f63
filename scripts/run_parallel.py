"""`python scripts/run_parallel.py KEY=VALUE …`: the same as `async-grpo experiment KEY=VALUE …`."""

import sys

from async_grpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["experiment", *sys.argv[1:]]))
