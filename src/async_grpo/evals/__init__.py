"""Evaluation: a policy version answers problems that it is not trained on, and what the answers prove.

`estimators` has the figures (pass@k and others, with intervals), `eval_ledger` makes them of finished groups and keeps
`evaluations.jsonl`, `evaluation` has the workers answer the problems of one evaluation, by `asking`, and decides
when a run evaluates. Rewards are the user's, called by the workers as in training. Start with
`estimators`.
"""
