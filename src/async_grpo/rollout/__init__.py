"""The worker's side: claim jobs, adopt weights, generate with the sampler's log-probabilities, score, hand back.

`async_grpo.engines` samples the tokens; the sandbox for rewards is in `async_grpo.rewards`. Start with `worker`.
"""
