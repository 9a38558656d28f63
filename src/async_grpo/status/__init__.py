"""A look at the processes of a run, conclusions about what holds it up, and how both are shown.

It only reads. What processes write about themselves is in `async_grpo.telemetry`. Start with `snapshot`.
"""
