"""The engines that sample tokens: transformers' `generate`, vLLM within the worker, a vLLM server.

What surrounds sampling (claims, prompts, rewards) is in `async_grpo.rollout`. Private names of vLLM live in `vllm`.
"""
