"""The processes that compute: the parameter server, the rollout worker, and the replay of a run.

Each puts the pieces of one side together and holds the order of its start and end.
`async_grpo.launch` starts them.
"""
