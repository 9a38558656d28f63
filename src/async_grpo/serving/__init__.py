"""vLLM servers on this machine that we start: the command, readiness by asking, a restart, the end by pid.

What a server is asked for is in `async_grpo.engines`; nothing here imports torch. Start with `vllm_server`.
"""
