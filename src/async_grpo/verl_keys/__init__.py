"""The keys that users of verl give to `main_ppo`, as a setup file and options of `train`.

`keys` reads them, `steps` has the arithmetic of batches, and `run` plans the run that scripts/main_ppo.py starts, on
which GPUs. Its setup file has all keys, and calls `trainer`, which makes the trainer of them.
"""

from async_grpo.verl_keys.keys import Keys
from async_grpo.verl_keys.run import VerlRun, planned

__all__ = ["Keys", "VerlRun", "planned"]
