"""The trainer side: batches from finished groups, staleness, off-policy correction, checkpoints."""
