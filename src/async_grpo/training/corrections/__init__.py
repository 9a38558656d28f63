"""Off-policy correction: what the loss takes as the old policy of a rollout, and how it weighs what is stale.

mu is the policy that sampled, pi_old the trainer's at the start of the batch, pi the one in training, A the advantage,
r = pi / pi_old, and w the ratio pi_old / mu of a token, a sequence or its mean token. TRL's loss does the rest.

    rule       the corrections, their thresholds and their sources; imports no torch. Start here
    weights    the formulas over tensors
    trl_loss   sets a correction on a generation batch, and on the inputs of TRL's loss
    checks     what is refused for a trainer, and what its loss is, in words
    tipping    one warning where the policy runs away from its rollouts
    kept_log_probs  log-probabilities over the tokens that truncated sampling kept
    metrics    of ratios, clipped and limited tokens, by length; the effective sample size of a step's sequences
"""
