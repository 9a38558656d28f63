"""Places for processes on one machine, and a queue of tasks for them: it knows nothing of seeds or of training.

A place is some GPUs, or a share of the cores; tasks have it alone, or share its memory. More tasks than places wait,
and so does a task that needs another one. What was started and how it ended is on disk, so that a killed queue
continues and redoes nothing. Processes are started and ended by a `starter`, on this machine `launch.supervisor`.
Start with `schedule`.
"""
