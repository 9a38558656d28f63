"""Train language models with GRPO, asynchronously: bring a TRL `GRPOTrainer`, change nothing in it."""

TYPE_CHECKING = False  # without importing `typing`: every command imports this module
if TYPE_CHECKING:
    from async_grpo.api import AsyncGRPO
    from async_grpo.errors import AsyncGRPOError

__all__ = ["AsyncGRPO", "AsyncGRPOError"]


def __getattr__(name: str) -> object:
    """The names of `__all__`, imported when they are first used."""
    if name == "AsyncGRPO":
        from async_grpo.api import AsyncGRPO

        return AsyncGRPO
    if name == "AsyncGRPOError":
        from async_grpo.errors import AsyncGRPOError

        return AsyncGRPOError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
