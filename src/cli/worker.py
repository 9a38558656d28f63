"""`python src/cli/worker.py …` is `async-grpo worker …`, without installing."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # src/, in place of this folder

from async_grpo.cli import main  # noqa: E402  # needs the path above

if __name__ == "__main__":
    sys.exit(main(["worker", *sys.argv[1:]]))
