"""A trainer that only the server's machine can have."""

from pathlib import Path

from async_grpo.errors import UsageError

if Path(__file__).parent.name == "setup":  # the tree that was sent to a node
    raise UsageError("there is no model of this name here")


def get_trainer():
    import time

    time.sleep(60)  # the server loads longer than the test takes
