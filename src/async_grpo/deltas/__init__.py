"""The chain of versions on disk: a snapshot, and the exact difference from each version to the next.

`chain` reads it, `writer` appends to it, and `encoder` does so in a thread of its own. `recorder` gives it the versions
of a parameter server, and `callback` those of any transformers trainer. `statistics` says what changed where and
`heat_map` draws it; `checkpoint` writes a version as a folder that transformers loads; `original` reads the files that
this format replaces. How two versions differ is in `async_grpo_ipc.delta`, which knows nothing of runs. Start with
`chain`.
"""
