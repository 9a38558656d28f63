"""The archive that `async-grpo doctor --dump` writes: logs, stacks, environment and settings, without secrets."""
