"""The keys that users of verl give to `main_ppo`, as a setup file and options of `train`.

`keys` reads them, `steps` has the arithmetic of batches, `devices` the GPUs, and `run` puts all into a setup file,
which is an ordinary one. scripts/main_ppo.py writes and starts it. `stop_early` is a callback for it.
"""

from async_grpo.verl_keys.keys import Keys
from async_grpo.verl_keys.run import VerlRun, planned

__all__ = ["Keys", "VerlRun", "planned"]
