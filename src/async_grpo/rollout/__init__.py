"""The worker side: generation with the sampler's log-probabilities, and scoring."""
