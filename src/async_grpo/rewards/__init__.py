"""What reward functions may use: a sandbox for code that a model wrote.

Calling reward functions is the work of `async_grpo.rollout.scoring`. Start with `sandbox`.
"""
