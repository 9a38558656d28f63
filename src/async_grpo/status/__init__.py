"""What a run does now, and what holds it up: processes seen, conclusions drawn, and the screen of both.

It only reads. What processes write is in `async_grpo.telemetry`. Start with `snapshot`.
"""
