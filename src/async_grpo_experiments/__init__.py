"""Many runs: one setup file on several seeds side by side, and what their results say together.

A run is an ordinary `async-grpo train`, or plain TRL, in a process of its own. `async_grpo` has all that one run needs
and never imports this package; it finds the commands here by name. Start with `sweeps`.
"""
