"""Notes of a process about itself while it runs: activity, named waits, stalls, and the lines of `metrics.jsonl`.

Conclusions about the whole run are drawn in `async_grpo.status`. Start with `activity`.
"""
