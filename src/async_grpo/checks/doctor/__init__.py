"""`async-grpo doctor`: is this machine, this directory and this setup file fit for a run, and if not, what to do."""
