"""One setup file, many seeds side by side: what each run gets, how the runs go, and what the seeds agree on.

Each run is an ordinary `async-grpo train`, or plain TRL, in a process of its own; `slots` starts and ends them. `plan`
says what a run gets, `report` and `comparison` have the statistics. Start with `sweep`.
"""
