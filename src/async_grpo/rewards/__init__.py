"""Rewards for setup files, and what reward functions may use.

`mathematics` has `gsm8k`, `math` and `final_number`, `programs` has `mbpp`; `answers` is the form that they ask for.
`questions` has those for questions that are answered by searching. `deadline` bounds the time of any reward function,
`sandbox` runs code that a model wrote. Calling reward functions is the work of `async_grpo.rollout.scoring`.
"""

from async_grpo.rewards.deadline import with_deadline
from async_grpo.rewards.mathematics import final_number, gsm8k, math
from async_grpo.rewards.programs import mbpp

__all__ = ["final_number", "gsm8k", "math", "mbpp", "with_deadline"]
