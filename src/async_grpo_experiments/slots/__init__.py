"""Places for processes on one machine, and a queue of tasks for them: it knows nothing of seeds or of training.

A place is some GPUs, or a share of the cores. More tasks than places wait, the longest first where that is known. What
was started and how it ended is on disk, so that a killed queue continues and redoes nothing. Processes are started and
ended by `launch.supervisor`. Start with `schedule`.
"""
