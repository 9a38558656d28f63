"""The former place of `async_grpo.rewards.sandbox`, for reward functions that import it from here."""

from async_grpo.rewards.sandbox import SWITCH, Limits, SandboxError, SandboxResult, run_code

__all__ = ["SWITCH", "Limits", "SandboxError", "SandboxResult", "run_code"]
