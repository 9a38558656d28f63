"""Starting a run's processes on one machine, watching, restarting and ending them, and the terminal meanwhile.

What the processes do is in `async_grpo.roles`. Start with `launcher`.
"""
