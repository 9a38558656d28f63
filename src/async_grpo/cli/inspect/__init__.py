"""The commands that read a run, a machine or a queue. None of them computes with a model."""
