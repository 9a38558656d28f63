"""Named sets of problems for experiments: their rows, and what rewards an answer to them.

A setup file gives both to its trainer; `async-grpo generate` and `evaluate` do the rest. Where no function rewards, a
reward model scores what was sampled, afterwards (`reward_models`). Start with `table`.
"""
