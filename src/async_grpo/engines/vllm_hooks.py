"""The private names of vLLM that `vllm` needs, and which of vLLM's model runners has them.

vLLM has two: the first (V1) on CPUs, the second (V2) by default on CUDA. Both hold the model, its weights and its
adapters under the same names. If a vLLM moves one of V2's, its engine is built with V1.
"""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from importlib import import_module

import torch

from async_grpo.log import logger

V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
OF_A_RUNNER = ("get_model", "reload_weights", "load_lora_model")  # the last sets `lora_manager`

HOOKS = (
    "vllm.v1.engine.llm_engine.LLMEngine.model_executor",
    "vllm.v1.worker.worker_base.WorkerWrapperBase.worker",
    "vllm.v1.worker.gpu_worker.Worker.model_runner",
    *(f"{V1_RUNNER}.GPUModelRunner.{name}" for name in OF_A_RUNNER),
    "vllm.lora.worker_manager.WorkerLoRAManager._load_adapter",
    "vllm._custom_ops._supports_onednn",
    "vllm.v1.engine.llm_engine.LLMEngine.renderer",
    "vllm.v1.engine.llm_engine.LLMEngine.reset_encoder_cache",
    "vllm.renderers.base.BaseRenderer.render_cmpl",
    "vllm.renderers.base.BaseRenderer.get_mm_processor",
    "vllm.multimodal.processing.processor.BaseMultiModalProcessor._apply_prompt_updates",
    "vllm.multimodal.processing.processor.BaseMultiModalProcessor._find_mm_placeholders",
    "vllm.multimodal.processing.context.InputProcessingContext.get_hf_processor",
)


class BuildersStream:
    """The CUDA stream of the thread that built an engine, for the thread that steps it.

    torch and vLLM (`current_stream`) keep a current stream for each thread. vLLM's second model runner copies tokens
    to the host behind the stream that was current while it warmed up: in a thread with another one, it would copy them
    before they are computed.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        self._thread = threading.get_ident()

    def use(self) -> None:
        """Make it current here; to be called before any work of the engine."""
        if self._stream is not None and threading.get_ident() != self._thread:
            torch.cuda.set_stream(self._stream)  # vLLM's own by now, which tells its `current_stream`
            self._thread = threading.get_ident()


def choose_model_runner(env: MutableMapping[str, str]) -> None:
    """Before an engine is built: have vLLM take its first model runner where the second lacks what we use."""
    if SWITCH in env:
        return
    try:
        runner = import_module(V2_RUNNER).GPUModelRunner
    except ImportError:  # a vLLM without it, or without what it needs: that one takes the first by itself
        return
    missing = [name for name in OF_A_RUNNER if not hasattr(runner, name)]
    if missing:
        env[SWITCH] = "0"
        logger.warning("vLLM's model runner V2 has no {}; the engine uses V1 ({}=0)", ", ".join(missing), SWITCH)
