"""The commands of `async-grpo` that are about many runs: one file each, as in `async_grpo.cli`, which names them."""
