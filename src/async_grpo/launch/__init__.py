"""Runs the processes of a run on one machine: command lines (`launcher`), the terminal (`screen`), and a supervisor.

`supervisor` starts, watches, restarts and ends processes, and knows nothing of a run. What the processes do is in
`async_grpo.roles`. Start with `launcher`.
"""
