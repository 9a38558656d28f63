"""Reports of what a run did: curves for TensorBoard, texts and rewards of its rollouts, as pages and tables.

It only reads. What happens now is in `async_grpo.status`. Start with `rollouts` or `board`.
"""
