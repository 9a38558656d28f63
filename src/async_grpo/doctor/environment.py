"""Environment variables of processes: which a report tells, and which hold secrets that must not be in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_grpo.redact import names_a_secret

SHORTEST = 6  # characters of a secret; shorter values would be found everywhere

# The only environment variables whose values are told.
TOLD = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("WORKER_DEVICE", "LOG_LEVEL", "FAST_INFERENCE", "CUDA_IPC_HANDLE_PATH", "UNSLOTH_COMPILE_LOCATION"),
    *("NCCL_DEBUG", "NCCL_P2P_DISABLE", "HF_HUB_OFFLINE", "VLLM_USE_V1", "VLLM_ATTENTION_BACKEND"),
    *("LD_LIBRARY_PATH", "CUDA_HOME", "LANG", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
)


def environment_of(pid: int) -> dict[str, str]:
    """Of a process of ours; empty where the kernel does not tell."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0") if b"=" in entry)
    return {name: value for name, _, value in pairs}


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Values of variables whose names say that they are secret."""
    return {
        value
        for name, value in environment.items()
        if names_a_secret(name) and len(value) >= SHORTEST and name not in TOLD
    }


def told_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the list that are set."""
    return {name: environment[name] for name in TOLD if name in environment}
