"""The worker's side: claim jobs, adopt weights, generate with the sampler's log-probabilities, score, hand back.

`engines` samples the tokens; the sandbox for rewards is in `async_grpo.rewards`. Start with `worker`.
"""

WEIGHTS_WAIT_S = 600.0  # for a version that the trainer has announced
