"""`python -m async_grpo.cli COMMAND` is `async-grpo COMMAND`."""

import os
import sys

from async_grpo.cli import main
from async_grpo.setup.process import rank_of_launch, run_as_rank

_, ranks = rank_of_launch(os.environ)
if ranks > 1:
    run_as_rank(main)
sys.exit(main())
