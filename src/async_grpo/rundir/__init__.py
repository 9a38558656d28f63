"""The run directory: its paths, its life from `prepare` to the end, its locks, and how its files are written whole.

What travels through `queue/` is in `async_grpo.queue`; what is kept later is in `async_grpo.archive`.
Start with `paths`.
"""
