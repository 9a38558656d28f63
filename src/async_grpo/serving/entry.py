"""`python -m async_grpo.serving.entry PARENT_PID ARGUMENT…`: becomes vLLM's server, which ends with its parent."""

from __future__ import annotations

import os
import sys

from async_grpo.setup.process import end_with_parent

SERVER = "vllm.entrypoints.openai.api_server"  # `vllm serve` is not there in vLLM's CPU build

if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))  # the kernel keeps this over the next line
    os.execv(sys.executable, [sys.executable, "-Pm", SERVER, *sys.argv[2:]])
