"""Environments of the package `verifiers` (0.4) as a dataset, a `rollout_func` and a reward function of TRL.

    environment = load_environment({"taskset": {"id": "textarena", "game": "WordSearch-v0"}}, limit=200)
    GRPOTrainer(
        train_dataset=environment.dataset, rollout_func=environment.rollout, reward_funcs=environment.reward, ...
    )

Start with `environment`, which plays each task and calls its tools. `refusals` says what is not mapped.
The tokens are in `async_grpo.envs.conversations`.
"""

from async_grpo.errors import UsageError

try:
    import verifiers.v1 as _verifiers  # noqa: F401
except ImportError as error:
    raise UsageError(
        f"async_grpo.envs.verifiers needs the package verifiers, which cannot be imported ({error}). Install it with "
        "`pip install 'async-grpo[verifiers]'`."
    ) from error

from async_grpo.envs.verifiers.environment import VerifiersEnvironment, load_environment

__all__ = ["VerifiersEnvironment", "load_environment"]
