"""Runs from Python: `AsyncGRPO(get_trainer, …).train()`, for scripts and notebooks.

A run is a child process, `async-grpo train`, so nothing is loaded here that trains. `trainer` is what a user calls,
and it finds the file that children can load `get_trainer` from, `options` turns keywords into the command's flags,
`run_handle` starts and watches the process of a run under way, `notebook` has its panel, `result` reads one that has
ended.
What a run does belongs into the rooms below.
"""

from async_grpo.api.result import Result
from async_grpo.api.run_handle import Handle
from async_grpo.api.trainer import AsyncGRPO

__all__ = ["AsyncGRPO", "Handle", "Result"]
