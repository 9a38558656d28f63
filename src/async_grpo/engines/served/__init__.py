"""Engines outside the worker: a vLLM server that is there already (`elsewhere`), or that the worker starts (`started`).

`client` is what both share. The process of a server is in `async_grpo.serving`.
"""
