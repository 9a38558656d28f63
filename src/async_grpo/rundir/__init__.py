"""The run directory: its paths, its life from `prepare` to the end, its locks, and files that appear whole.

What travels through `queue/` is in `async_grpo.queue`; what is kept later is in `async_grpo.archive`.
Start with `paths`; `lifecycle` decides what a start does with a directory, `locks` which processes are alive. `reading`
opens every file that others may have written, `shape` checks what is in it, and `folders` where it may lie.
"""
