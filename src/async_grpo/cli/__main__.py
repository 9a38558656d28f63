"""`python -m async_grpo.cli COMMAND` is `async-grpo COMMAND`."""

import sys

from async_grpo.cli import main

sys.exit(main())
