"""What a run has used: the record of consumption, finished groups, checkpoints' rollout state, and the audit of them.

Groups that still wait to be used belong to `async_grpo.queue`. Start with `history`.
"""
