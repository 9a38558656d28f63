"""What a run does now and what holds it up: a look at its processes, conclusions, and how both are shown.

It only reads. What processes write about themselves is in `async_grpo.telemetry`. Start with `snapshot`.
"""
