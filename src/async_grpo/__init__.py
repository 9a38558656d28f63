"""Train language models with GRPO, asynchronously: bring a TRL `GRPOTrainer`, change nothing in it."""
