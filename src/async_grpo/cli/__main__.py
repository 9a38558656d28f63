"""`python -m async_grpo.cli COMMAND` is `async-grpo COMMAND`."""

import os
import sys

from async_grpo.cli import main

if os.environ.get("WORLD_SIZE", "1") != "1":  # a rank of `accelerate launch` or `torchrun`
    from async_grpo.setup.process import run_as_rank

    run_as_rank(main)
sys.exit(main())
