"""`python -m async_grpo.checks.doctor.gpu_probe`: answers what torch and cupy say of the GPUs.

A process of its own, because a driver that does not match can end the process that asks.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from async_grpo.checks import probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    total: int  # bytes
    free: int
    capability: str  # "9.0"
    supported: bool  # torch has kernels for it
    why_no_ipc: str | None  # None: its memory can be shared by CUDA IPC


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    torch: str
    torch_cuda: str | None  # "12.8"; None: a build without CUDA
    usable: bool
    error: str = ""  # why not
    cupy: str = ""  # version; empty: it cannot be imported
    cupy_cuda: int = 0  # of cupy's runtime, e.g. 12080
    cupy_error: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    peers: list[list[bool]] = field(default_factory=list)  # [reader][owner]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> GpuFacts:
        return cls(**{**data, "gpus": [Gpu(**gpu) for gpu in data["gpus"]]})


def gather() -> GpuFacts:
    import torch

    error = ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch does not annotate it
    except (RuntimeError, AssertionError) as failure:  # AssertionError: a build without CUDA
        error = str(failure).splitlines()[0]
    usable = torch.cuda.is_available() and not error
    count = torch.cuda.device_count() if usable else 0
    return GpuFacts(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        usable=usable,
        error=error,
        gpus=[_gpu(index) for index in range(count)],
        peers=[[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)],
        **_cupy(),
    )


def _gpu(index: int) -> Gpu:
    import torch

    from async_grpo_ipc.memory.cuda_runtime import why_not

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    return Gpu(
        name=properties.name,
        total=total,
        free=free,
        capability=f"{properties.major}.{properties.minor}",
        supported=_runs(index),
        why_no_ipc=why_not(torch.device("cuda", index)),
    )


def _runs(index: int) -> bool:
    """Whether a kernel of torch's runs there: a list of architectures would leave out what is compiled later."""
    import torch

    try:
        return int((torch.ones(2, device=f"cuda:{index}") * 2).sum().item()) == 4
    except RuntimeError:
        return False


def _cupy() -> dict[str, Any]:
    try:
        import cupy

        return {"cupy": cupy.__version__, "cupy_cuda": int(cupy.cuda.runtime.runtimeGetVersion())}
    except Exception as failure:  # noqa: BLE001  # cupy raises its own errors for a driver that does not fit
        return {"cupy_error": f"{type(failure).__name__}: {failure}".splitlines()[0]}


if __name__ == "__main__":
    probe.answer(lambda question: asdict(gather()))
