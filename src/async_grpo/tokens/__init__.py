"""Tokens on their way from an engine to the queue file: a sequence with columns, and a completion's transcript.

Nothing here imports torch, or knows who samples. Start with `sequence`.
"""

from async_grpo.tokens.sequence import NO_VERSION, Tokens, as_tokens, ids_and_logprobs, unsampled

__all__ = ["NO_VERSION", "Tokens", "as_tokens", "ids_and_logprobs", "unsampled"]
