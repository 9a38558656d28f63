"""What a process writes about itself while it runs: activity, named waits, stalls, and the lines of `metrics.jsonl`.

Drawing conclusions from it is the work of `async_grpo.status`. Start with `activity`.
"""
